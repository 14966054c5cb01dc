"""Export a run: its averaged checkpoint as a bundle, which may contain other formats.

Nothing in the run's YAML is executed: its parts are described as plain data.
"""

import hashlib
import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml.comments import CommentedMap
from safetensors.torch import load, save
from torch import Tensor

from sbkit.base.checksums import CHECKSUMS, find_damage, read_checksums, write_checksums
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import (
    RUN_YAML,
    TEMPORARY_NAMES,
    atomic_folder,
    fsync_tree,
    is_run,
    parsing_errors,
    read_file,
    require_regular,
    require_writable,
    to_json,
)
from sbkit.base.imports import (
    code_of,
    dotted_path,
    import_user_modules,
    imported_modules,
    user_code,
)
from sbkit.base.messages import listed
from sbkit.base.units import SAMPLE_RATE
from sbkit.base.versions import versions
from sbkit.bundle.allowed_classes import ALLOWED_MODULES
from sbkit.bundle.config import BUNDLE_FORMAT, CONFIG_FILE, WEIGHTS_FILE, require_run
from sbkit.bundle.module_spec import ARGUMENTS_KEY, CLASS_MODULES, SpecWriter
from sbkit.bundle.side_inputs import SIDE_SHAPES
from sbkit.bundle.task import BUILT_IN_PACKAGE, Task, load_task
from sbkit.checkpoint.folder import TASK, Checkpoint
from sbkit.checkpoint.ranking import NORMALIZER, PARTS, SavedCheckpoints
from sbkit.checkpoint.run_config import BUNDLE, CHECKPOINTS, read_description
from sbkit.checkpoint.weights import average_checkpoints, check_same_model, part_names_of_yaml
from sbkit.config.hparams import read_spec
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.fit import FittedDecoder
from sbkit.evaluate.run_results import read_json
from sbkit.export.format_table import FORMATS
from sbkit.export.formats import ParityReports, write_formats
from sbkit.export.model_card import (
    FACTS_FILE,
    UNKNOWN_LICENSE,
    card_facts,
    without_language_models,
    write_card,
)
from sbkit.models.pretrained.encoder import PretrainedEncoder, PretrainedTransformer
from sbkit.models.pretrained.lora import merge_adapters
from sbkit.runtime.runtimes import load_bundle

logger = logging.getLogger(__name__)

LORA_CLASSES = {*map(dotted_path, (PretrainedEncoder, PretrainedTransformer))}


def export_run(
    run: Path | str,
    out: Path | str,
    *,
    formats: Sequence[str] = (),
    license: str = UNKNOWN_LICENSE,
    weights: Path | str | None = None,
    language_models: bool = True,
    user_modules: frozenset[str] = frozenset(),
) -> ParityReports:
    """Copy the bundle of a run, with a model card and further formats; return their reports.

    ``out`` is written completely or not at all. A format that differs too much from the trained
    model is left out, and its parity report says why.

    Args:
        run: the run folder. A run that has not ended has no bundle yet: its best checkpoint is
            exported, and decodes greedily.
        out: the new bundle; replaces an earlier bundle.
        formats: names of FORMATS; each is compared with the trained model.
        license: for the model card.
        weights: a safetensors file that replaces the bundle's weights, with the same names and
            shapes. The bundle then decodes greedily, without confidences, and has no results.
        language_models: whether to copy them. Without them, the bundle decodes greedily, too, and
            its card says what that costs.
        user_modules: the modules of `--import`, which define parts of the model, or its task.
    """
    formats = [formats] if isinstance(formats, str) else formats
    run = Path(run)
    out = Path(out).resolve()
    require_run(run)
    require_new(out, model=run)
    with exported_bundle(run, user_modules) as source, replacing_bundle(out) as folder:
        copy_files(source, folder)
        if weights is not None:
            replace_weights(folder, Path(weights))
        leaves_out = not language_models and (folder / LANGUAGE_MODELS_FILE).exists()
        if leaves_out:
            remove_decoder(folder)
        # A bundle that cannot be loaded is not exported.
        bundle = load_bundle(folder, user_modules=user_modules)
        reports: ParityReports = {}
        if formats:
            reports = write_formats(bundle, run, folder, formats, user_modules=user_modules)
        written_formats = [
            name for name in formats if any(report["written"] for report in reports[name].values())
        ]
        config = read_json(folder / CONFIG_FILE)
        facts = card_facts(run, bundle.task, config, written_formats, license=license)
        if weights is not None:
            facts |= {"weights": Path(weights).name}
        if weights is not None or source != run / BUNDLE:  # the test measured that bundle
            facts |= {"results": []}
        if leaves_out:
            facts = without_language_models(facts)
        write_card(folder, facts)
        for name in written_formats:
            if library := FORMATS[name].library:
                write_card(folder / name, facts | {"formats": {}}, library=library)
                write_checksums(folder / name)
        write_checksums(folder)
    return reports


@contextmanager
def exported_bundle(
    model: Path | str, user_modules: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yield the folder of a bundle, of the bundle of a run, or of a temporary one of a run.

    >>> with exported_bundle("results/my_model/3407") as folder:  # doctest: +SKIP
    ...     bundle = load_bundle(folder)
    """
    model = Path(model)
    if (model / CONFIG_FILE).exists() or not is_run(model):
        yield model
        return
    if (model / BUNDLE / CONFIG_FILE).exists():
        yield model / BUNDLE
        return
    if (model / LANGUAGE_MODELS_FILE).exists():
        logger.warning(
            "note: this run has not ended, so its decoder has no weights yet, and the bundle "
            f"decodes greedily. Finish the run, or fit the weights: sbkit tune {model} --out NEW"
        )
    import_user_modules(user_modules)  # their code goes into the bundle
    with TemporaryDirectory() as folder:
        write_bundle(Path(folder), collect_files(model, user_modules))
        yield Path(folder)


def write_bundle(
    folder: Path,
    files: Mapping[str, bytes],
    fitted: FittedDecoder | None = None,
    language_models: Path | None = None,
) -> None:
    """Write the collected files of a bundle, with a fitted decoder if there is one."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if fitted is None:
        write_checksums(folder)
    else:
        _write_decoder(folder, fitted, language_models)


def add_formats(run: Path, names: Sequence[str], user_modules: frozenset[str]) -> ParityReports:
    """Write formats into the bundle of a run, beside those that it has; all of them or none."""
    bundle = run / BUNDLE
    with replacing_bundle(bundle) as folder:
        copy_files(bundle, folder, formats=FORMATS.keys() - {*names})
        reloaded = load_bundle(folder, user_modules=user_modules)
        return write_formats(reloaded, run, folder, names, user_modules=None)


def copy_files(bundle: Path, folder: Path, *, formats: Collection[str] = ()) -> None:
    """Copy the listed files of a bundle and some of its formats, except those with a link."""
    names = {CHECKSUMS, *read_checksums(bundle), *formats}
    for path in filter(lambda path: path.name in names, bundle.iterdir()):
        inner_paths = path.rglob("*") if path.name in formats else ()
        if path.is_symlink() or any(inner.is_symlink() for inner in inner_paths):
            logger.info(f"{path.name} is left out: a link may lead out of the bundle")
        elif path.is_file():
            require_regular(path)
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and path.name in formats:
            shutil.copytree(path, folder / path.name)


def set_decoder(bundle: Path, out: Path, fitted: FittedDecoder, language_models: Path) -> None:
    """Copy a bundle with a fitted decoder to ``out``, without the results in its model card.

    No format contains a decoder. language_models: the file of the decoder's language models.
    """
    with replacing_bundle(out) as folder:
        copy_files(bundle, folder, formats=FORMATS)
        if (facts := read_json(folder / FACTS_FILE)) is not None:
            write_card(folder, facts | {"results": [], "cost_of_greedy": None})
        _write_decoder(folder, fitted, language_models)


def _write_decoder(
    folder: Path, fitted: FittedDecoder, language_models: Path | None, **changes: object
) -> None:
    if language_models is not None:
        shutil.copyfile(language_models, folder / LANGUAGE_MODELS_FILE)
    decoder, confidence = fitted.decoder_record, fitted.confidence_record
    config = read_json(folder / CONFIG_FILE)
    config |= {"decoder": decoder, "confidence": confidence, **changes}
    (folder / CONFIG_FILE).write_text(to_json(config, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)


def replace_weights(folder: Path, file: Path) -> None:
    """Replace the weights of a bundle, and remove the decoder and the results of the old ones."""
    content = read_file(file)
    with parsing_errors(file, "be a safetensors file", fix="Name another one."):
        weights = load(content)
    check_same_model(weights, load((folder / WEIGHTS_FILE).read_bytes()), place=str(file))
    (folder / WEIGHTS_FILE).write_bytes(content)
    remove_decoder(folder, checkpoints=[])
    logger.info(f"note: no decoder is fitted to {file}, so the bundle decodes greedily.")


def remove_decoder(folder: Path, **changes: object) -> None:
    """Remove the decoder of a bundle, with its language models and the confidences of words."""
    (folder / LANGUAGE_MODELS_FILE).unlink(missing_ok=True)
    _write_decoder(folder, FittedDecoder(None, None, {}, ()), None, **changes)


# ---- the folder that `--out` names


def require_new(out: Path, *, model: Path) -> None:
    """Raise ConfigError if ``out`` is the model itself, the bundle of a run, or not replaceable."""
    is_bundle_of_run = out.name == BUNDLE and is_run(out.parent)
    if is_bundle_of_run or out == model.resolve():
        raise ConfigError(
            f"`out` must be a new folder, but {out} is the model itself or the bundle of a run."
        )
    require_replaceable(out)


def require_replaceable(out: Path) -> None:
    """Raise ConfigError unless ``out`` is missing, empty, or a bundle as it was exported."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    reason = None if (out / CONFIG_FILE).is_file() else "it is not a bundle"
    # An export lists the files of each folder that it writes in a checksum file there.
    for folder in filter(Path.is_dir, [out, *(out / name for name in FORMATS)]):
        if reason is None and (damage := find_damage(folder)) is not None:
            reason = f"in {folder.relative_to(out.parent)}, {damage}"
    if reason is not None:
        raise ConfigError(
            f"`out` must be a new folder or an unchanged bundle, but {out} is neither: {reason}."
        )


@contextmanager
def replacing_bundle(out: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, then rename it to ``out``; an unchanged bundle is replaced.

    Other files in ``out`` stay there.
    """
    require_writable(out.parent, option="out")
    with atomic_folder(out) as new:
        yield new
        fsync_tree(new)
        # Checksums take seconds, so they are computed while the earlier bundle is in its place. A
        # kill between the two renames would leave it in the temporary folder.
        require_replaceable(out)
        prefix, suffix = TEMPORARY_NAMES.split("*")
        with TemporaryDirectory(prefix=prefix, suffix=suffix, dir=out.parent) as parent:
            earlier = Path(parent, out.name)
            try:
                if out.exists():
                    out.rename(earlier)
                new.rename(out)
            except BaseException:  # also Ctrl-C
                if earlier.exists() and not out.exists():
                    earlier.rename(out)
                raise
            names = {CHECKSUMS, *read_checksums(earlier), *FORMATS}
            for path in earlier.iterdir() if earlier.exists() else ():
                if path.name not in names and not (out / path.name).exists():
                    path.rename(out / path.name)


# ---- the files of a bundle


def collect_files(
    run: Path,
    user_modules: frozenset[str] | None = None,
    *,
    untrained_weights: Mapping[str, Tensor] | None = None,
) -> dict[str, bytes]:
    """Return the contents of a bundle's files by name, with the averaged weights and no decoder.

    user_modules: the modules that `--import` names; None for all that the model needs.
    untrained_weights: of the model, in the place of those of the checkpoints.
    """
    root = read_spec(run / RUN_YAML).tree
    checkpoints = read_checkpoints(run)
    task_name = checkpoints[0].meta[TASK]
    task = load_task(task_name, user_modules=_modules_of(task_name, {}, user_modules))
    files: dict[str, bytes] = {}
    built_objects: dict[str, object] = {}
    if task.label_file is not None:
        file = run / task.label_file
        files[file.name] = read_file(file)
        digests = read_description(run).labels or {}
        if digests.get(file.name) != hashlib.sha256(files[file.name]).hexdigest():
            raise BundleError(f"{file} has changed since the run was trained.")
        built_objects[task.label_key] = task.read_labels(file, files[file.name])
    for file in map(run.joinpath, task.further_files.values()):
        if file.is_file():
            files[file.name] = read_file(file)
    parts = part_facts(root, built_objects, task, checkpoints[0].meta.get(PARTS, ()))
    user_modules = _modules_of(task_name, parts, user_modules)
    code_by_file = code_files(user_modules)
    files |= code_by_file
    weights = untrained_weights
    if weights is None:
        weights = average_checkpoints(checkpoints, "model")
    files[WEIGHTS_FILE] = save(bundle_weights(weights, root, task))
    config = {
        "format": BUNDLE_FORMAT,
        "task": task.name,
        "sample_rate": root.get("sample_rate", SAMPLE_RATE),
        **parts,
        "decoder": None,
        "confidence": None,
        "checkpoints": [
            {key: meta[key] for key in ("epoch", *task.metrics) if key in meta}
            for meta in (checkpoint.meta for checkpoint in checkpoints)
            if untrained_weights is None
        ],
        NORMALIZER: checkpoints[0].meta.get(NORMALIZER),
        "versions": versions(distributions(user_modules, code_by_file)),
    }
    if shapes := checkpoints[0].meta.get(SIDE_SHAPES):
        config[SIDE_SHAPES] = shapes
    if user_modules:
        config["user_modules"] = sorted(user_modules)
    if "language" in root:
        config["language"] = str(root["language"])
    files[CONFIG_FILE] = (to_json(config, indent=1) + "\n").encode()
    return files


def _modules_of(
    task: str, parts: Mapping[str, Any], user_modules: frozenset[str] | None
) -> frozenset[str]:
    """Return ``user_modules``, or by default the modules outside sbkit that define task and parts.

    The default includes the modules beside them that they import.
    """
    if user_modules is not None:
        return user_modules
    modules = [*{*CLASS_MODULES.findall(to_json(parts))} - ALLOWED_MODULES]
    if not task.startswith(BUILT_IN_PACKAGE):
        modules.append(task.rpartition(".")[0])
    imported = user_code(*modules)
    return frozenset([*modules, *(name for name in imported if code_files([name]))])


def read_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the checkpoints that the run's test averages, or the best one before the test."""
    folder = run / CHECKPOINTS
    checkpoints = SavedCheckpoints(folder).find_averaged()
    if not checkpoints:
        raise BundleError(f"{folder} has no undamaged checkpoint to export.")
    best = checkpoints[0]
    if TASK not in best.meta:
        raise BundleError(f"{best.path} does not name the task of its run. Train with train.py.")
    return checkpoints


def part_facts(
    root: CommentedMap, built_objects: Mapping[str, object], task: Task, names: Sequence[str]
) -> dict[str, Any]:
    """Describe the parts of a model as plain data, as `model` and `parts` of a configuration.

    `model` lists the names of the parts in the YAML's ModuleList, in order. `parts` describes
    these and the other parts that the model is made from.

    built_objects: by YAML key; parts may refer to their attributes.
    names: the names of the parts from which the Brain makes the model.
    """
    listed_names = [name for name in part_names_of_yaml(root) if name not in task.training_parts]
    if unexpected := [name for name in listed_names if name not in names]:
        raise ConfigError(
            f"`model` lists {listed(unexpected)}, which is neither in `parts` of the Brain nor in "
            "`training_parts` of the task. Add it there, or take it out of the list."
        )
    objects_by_node = {
        id(root.get(key)): built for key, built in built_objects.items() if built is not None
    }
    parts: dict[str, Any] = {}
    for name in (*listed_names, *names):
        part: Any = SpecWriter(name, objects_by_node).write(root.get(name))
        is_object = isinstance(part, dict)  # otherwise a number or a text
        if is_object and part.get("new") in LORA_CLASSES and "lora" in part[ARGUMENTS_KEY]:
            part[ARGUMENTS_KEY]["lora"] = None  # the exported weights contain the adapters
        parts[name] = part
    main_parts = [
        name for name in parts if "__main__" in CLASS_MODULES.findall(to_json(parts[name]))
    ]
    if "__main__" in (type(task).__module__, task.model_class().__module__):
        main_parts.append("task")
    if main_parts:
        raise ConfigError(
            f"{listed(main_parts)} cannot be exported, because the class is defined in `__main__`. "
            "Move it into a file, such as my_parts.py, and name it there: !new:my_parts.NAME"
        )
    require_no_recipes(task)
    return {"model": listed_names, "parts": parts}


def require_no_recipes(task: Task) -> None:
    """Raise ConfigError if a task imports `recipes`, which is missing where bundles run."""
    for module in _modules_of(task.name, {}, None):
        code_by_file = code_files([module])
        imported = [name for code in code_by_file.values() for name in imported_modules(code)]
        if any(name.partition(".")[0] == "recipes" for name in (module, *imported)):
            raise ConfigError(
                f"The task {task.name} must be defined without `recipes`, but {module} needs it. "
                "Move the recipe into another module."
            )


# ---- user modules: a bundle has their code, and the versions of the packages that they import


@cache
def _installed_packages() -> Mapping[str, Sequence[str]]:
    """Return the distributions of each importable name; finding them takes 0.3 s."""
    return packages_distributions()


def code_files(user_modules: Iterable[str]) -> dict[str, bytes]:
    """Return the code that ran, by file name; installed and compiled modules are left out."""
    installed = _installed_packages()
    code_by_file: dict[str, bytes] = {}
    for name in sorted(user_modules):
        is_installed = name.partition(".")[0] in installed
        if not is_installed and (code := code_of(name)) is not None:
            code_by_file[f"{name}.py"] = code
    return code_by_file


def distributions(user_modules: Iterable[str], code_by_file: Mapping[str, bytes]) -> list[str]:
    """Name the installed packages that modules belong to, or that their code imports."""
    installed = _installed_packages()
    names = {*user_modules, *chain(*map(imported_modules, code_by_file.values()))}
    packages = {name.partition(".")[0] for name in names}
    return sorted({name for package in packages for name in installed.get(package, ())})


def bundle_weights(
    weights: Mapping[str, Tensor], root: CommentedMap, task: Task
) -> dict[str, Tensor]:
    """Return the weights of a bundle, with renumbered parts and merged adapters."""
    names = part_names_of_yaml(root)
    indices = [index for index, name in enumerate(names) if name not in task.training_parts]
    new_index = {str(old): new for new, old in enumerate(indices)}
    renumbered = {}
    for name, value in merge_adapters(weights).items():
        index, _, path = name.partition(".")  # a name is the index of the part, a dot and a path
        if index in new_index:
            renumbered[f"{new_index[index]}.{path}"] = value.clone()
    return renumbered

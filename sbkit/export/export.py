"""Export a run: write its best checkpoint as a bundle, with other formats beside it.

Nothing in the run's YAML is executed: its parts are described as plain data.
"""

import ast
import inspect
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml.comments import CommentedMap
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.checksums import checksum, find_damage, write_checksums
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import building, fsync_tree, require_writable, to_json
from sbkit.base.messages import listed
from sbkit.base.units import SAMPLE_RATE
from sbkit.base.versions import versions
from sbkit.bundle.config import CONFIG_FILE, FORMAT, WEIGHTS_FILE
from sbkit.bundle.module_spec import ARGUMENTS, to_plain
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.provenance import make_provenance, read_json, to_safetensors
from sbkit.checkpoint.run_config import CHECKPOINTS, RESOLVED, read_run_config
from sbkit.checkpoint.weights import part_names_of_yaml
from sbkit.config.document import read_document, tag_of
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.decoding.words import CONFIDENCE_FILE
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.formats import (
    HUB,
    HUGGINGFACE,
    ParityReports,
    require_formats,
    write_formats,
    write_hub,
)
from sbkit.export.model_card import TRANSFORMERS, UNKNOWN_LICENSE, model_card
from sbkit.export.parity import FULL_GRID, Grid
from sbkit.export.traced import TrainedModel
from sbkit.models.pretrained.parts import PretrainedEncoder
from sbkit.runtime.torch_model import load_bundle
from sbkit.tasks.task import Task, load_task

logger = logging.getLogger(__name__)

CARD = "README.md"
PRETRAINED_ENCODER = f"{PretrainedEncoder.__module__}.{PretrainedEncoder.__name__}"


def export_run(
    run: Path,
    out: Path,
    *,
    formats: Sequence[str] = (),
    license: str = UNKNOWN_LICENSE,
    grid: Grid = FULL_GRID,
    user_modules: frozenset[str] = frozenset(),
) -> ParityReports:
    """Write the best checkpoint of a run as a bundle, whole or not at all, with its formats.

    A format that misses its limits is not written; its parity report, which is returned, says why.

    Args:
        run: the run folder.
        out: the new bundle; replaces an earlier bundle.
        formats: names of further formats, each compared with the trained model.
        license: for the model card.
        grid: the batches that formats are compared on.
        user_modules: the modules that `--import` names, with parts of the model or its task.

    Raises:
        SbkitError: ``run`` is not a run folder, has no good checkpoint, or names a class that is
            not on the list; or ``out`` holds anything but an earlier bundle.
    """
    require_formats(formats)
    out = out.resolve()
    if not (run / RESOLVED).is_file():
        raise BundleError(
            f"{run} is no run folder: it has no {RESOLVED}. Name the folder that training printed, "
            "such as results/ctc/en/3407."
        )
    require_replaceable(out)
    contents, config = _contents(run, user_modules)
    with replacing_bundle(out) as folder:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        write_checksums(folder)
        # A bundle that cannot be loaded is not exported.
        bundle = load_bundle(folder, user_modules=user_modules)
        reports: ParityReports = {}
        if compared := [name for name in formats if name != HUB]:
            trained = TrainedModel(bundle, user_modules)
            reports = write_formats(trained, run, folder, compared, grid)
        written = [
            name
            for name in formats
            if name == HUB or any(report["written"] for report in reports[name].values())
        ]
        _write_cards(run, folder, bundle.task, config, written, license)
        if HUB in formats:
            write_hub(folder)
    return reports


@contextmanager
def exported_bundle(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the folder of a bundle, or of a temporary bundle made from a run."""
    if (model / CONFIG_FILE).exists() or not (model / RESOLVED).is_file():
        yield model
        return
    with TemporaryDirectory() as folder:
        export_run(model, Path(folder, "bundle"), user_modules=user_modules)
        yield Path(folder, "bundle")


def _write_cards(
    run: Path,
    folder: Path,
    task: Task,
    config: Mapping[str, Any],
    formats: Sequence[str],
    license: str,
) -> None:
    card = model_card(run, task, config, formats, license=license)
    (folder / CARD).write_text(card, encoding="utf-8")
    if HUGGINGFACE in formats:
        card = model_card(run, task, config, [], license=license, library=TRANSFORMERS)
        (folder / HUGGINGFACE / CARD).write_text(card, encoding="utf-8")
        write_checksums(folder / HUGGINGFACE)
    write_checksums(folder)


# The folder that `--out` names


def require_replaceable(out: Path, *, moved_to: Path | None = None) -> None:
    """Raise ConfigError unless a folder is new, empty, or a bundle as it was exported.

    ``moved_to`` is where its content is, if that was moved.
    """
    content = moved_to or out
    if not content.exists() or (content.is_dir() and not any(content.iterdir())):
        return
    reason: str | None = "it is no bundle"
    if (content / CONFIG_FILE).is_file():
        folders = [content, *(path for path in content.iterdir() if path.is_dir())]
        damages = ((folder.name, find_damage(folder)) for folder in folders)
        reason = next((f"in {name}, {damage}" for name, damage in damages if damage), None)
    if reason is not None:
        raise ConfigError(
            f"--out must be a new folder or an unchanged bundle, but {out} is neither: {reason}. "
            "Choose another folder."
        )


@contextmanager
def replacing_bundle(out: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, then rename it to ``out``, in place of an unchanged bundle.

    Raises:
        SbkitError: nothing can be written there, or somebody has put other files into ``out``.
    """
    require_writable(out.parent, option="--out")
    with building(out) as new:
        yield new
        fsync_tree(new)
        temporary = TemporaryDirectory(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
        with temporary as parent:
            earlier = Path(parent, out.name)
            if out.exists():
                out.rename(earlier)  # before the check, so that no file can be added after it
            try:
                require_replaceable(out, moved_to=earlier)
                new.rename(out)
            except BaseException:  # also Ctrl-C
                if earlier.exists():
                    earlier.rename(out)
                raise


def change_config(bundle: Path, **values: object) -> None:
    """Change values in config.json of a bundle, and of its copy for a hub if there is one."""
    for folder in (bundle, bundle / HUB):
        if (folder / CONFIG_FILE).exists():
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            text = to_json(config | values, indent=1) + "\n"
            (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
            write_checksums(folder)


# The files of a bundle


def _contents(run: Path, user_modules: frozenset[str]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Collect the files of a bundle, and its configuration."""
    root = read_document(run / RESOLVED).root
    checkpoints, task = _read_checkpoints(run / CHECKPOINTS, user_modules)
    contents, labels = _read_labels(run, task)
    contents |= (sources := source_files(user_modules))
    for note in recipe_import_notes(sources):
        logger.info(note)
    parts = describe_parts(root, {task.labels.key: labels} if task.labels else {}, task)
    decoder = read_json(run / DECODER_FILE)  # used for the run's test
    if decoder is not None:
        contents[LANGUAGE_MODELS] = (run / LANGUAGE_MODELS).read_bytes()
    elif "decoder" in root and (run / LANGUAGE_MODELS).exists():
        logger.warning(
            "note: the decoder of this run has no weights yet, so the bundle decodes greedily. "
            f"Finish the run, or fit the weights: sbkit tune {run}"
        )
    weights = to_safetensors(checkpoints)
    omitted = task.require_export().training_parts
    indices = [index for index, name in enumerate(part_names_of_yaml(root)) if name not in omitted]
    contents[WEIGHTS_FILE] = to_safetensors(checkpoints, indices) if omitted else weights
    confidence = read_json(run / CONFIDENCE_FILE)
    config = {
        "format": FORMAT,
        "task": task.name,
        "sample_rate": root.get("sample_rate", SAMPLE_RATE),
        **parts,
        "decoder": decoder,
        "confidence": confidence,
        PROVENANCE: make_provenance(
            weights=weights,
            decoder=decoder,
            language_models=contents.get(LANGUAGE_MODELS),
            confidence=confidence,
        ),
        "checkpoints": [
            {key: meta[key] for key in ("epoch", *task.metrics) if key in meta}
            for meta in (checkpoint.meta for checkpoint in checkpoints)
        ],
        NORMALIZER: checkpoints[0].meta.get(NORMALIZER),
        "versions": versions(distributions(user_modules, sources)),
        **({"user_modules": sorted(user_modules)} if user_modules else {}),
        **({"language": str(root["language"])} if "language" in root else {}),
    }
    contents[CONFIG_FILE] = (to_json(config, indent=1) + "\n").encode()
    return contents, config


def _read_checkpoints(folder: Path, user_modules: frozenset[str]) -> tuple[list[Checkpoint], Task]:
    """Find the undamaged checkpoints that were tested, or the best one on dev; load their task."""
    checkpoints = Checkpointer(folder).find_averaged() if folder.is_dir() else []
    if not checkpoints:
        raise BundleError(
            f"{folder} has no undamaged checkpoint to export. Train the run first: torchrun "
            "train.py hparams/ctc.yaml"
        )
    best = checkpoints[0]
    if TASK not in best.meta:
        raise BundleError(
            f"{best.path} cannot be exported, because it does not name the task of its run. "
            "Train with train.py and a recipe, which names it."
        )
    return checkpoints, load_task(best.meta[TASK], user_modules=user_modules)


def _read_labels(run: Path, task: Task) -> tuple[dict[str, bytes], Any]:
    """Read the label file of the training; return its content by file name, and its labels."""
    if task.labels is None:
        return {}, None
    file = run / task.labels.name
    if read_run_config(run).labels != checksum(file):
        raise BundleError(
            f"{file} is not the file that the run was trained with, so the model's predictions "
            "would get wrong names. Restore it."
        )
    content = file.read_bytes()
    return {file.name: content}, task.labels.read(file, content)


def describe_parts(root: CommentedMap, objects: Mapping[str, object], task: Task) -> dict[str, Any]:
    """Describe a model's parts as plain data, and the order in which its ModuleList owns them.

    The parts are the entries of the ModuleList, and others that the task's model takes from the
    YAML. They may refer to attributes of ``objects``, which are built objects by their YAML key.

    Raises:
        SbkitError: a part cannot be described as plain data, or the model takes no such part.
    """
    export = task.require_export()
    owned = [name for name in part_names_of_yaml(root) if name not in export.training_parts]
    parameters = inspect.signature(export.import_model_class()).parameters
    takes_any_key = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unexpected = [name for name in owned if name not in (root if takes_any_key else parameters)]
    if unexpected:
        raise ConfigError(
            f"`model` must list only parts that {export.model_class} takes, each under its own "
            f"key, but lists {listed(unexpected)}. Remove unused parts, or move them into the "
            "other parts."
        )
    unowned = [name for name in parameters if name != "model" and tag_of(root.get(name))]
    by_node = {id(root.get(key)): built for key, built in objects.items() if built is not None}
    names = dict.fromkeys([*owned, *unowned])
    parts: Any = {name: to_plain(root[name], key=name, objects=by_node) for name in names}
    for part in parts.values():
        if part.get("new") == PRETRAINED_ENCODER and "lora" in part[ARGUMENTS]:
            part[ARGUMENTS]["lora"] = None  # its weights have the adapters merged
    return {"model": owned, "parts": parts}


# User modules: a bundle has their source, and the versions of the packages that they import


def source_files(user_modules: Iterable[str]) -> dict[str, bytes]:
    """Return the source of modules by file name; installed and compiled modules are left out."""
    installed, sources = packages_distributions(), dict[str, bytes]()
    for name in sorted(user_modules):
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        if name.partition(".")[0] not in installed and file.suffix == ".py":
            sources[f"{name}.py"] = file.read_bytes()
    return sources


def recipe_import_notes(sources: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a note for each file that imports `recipes`, which an installed sbkit does not have."""
    for file, source in sources.items():
        names = sorted({name for name in _imported(source) if name.partition(".")[0] == "recipes"})
        if names:
            yield (
                f"note: {file} imports {', '.join(names)}, so the bundle only loads in a checkout "
                "of sbkit, not in an installation."
            )


def distributions(user_modules: Iterable[str], sources: Mapping[str, bytes]) -> list[str]:
    """Name the installed packages that modules belong to, or that their source imports."""
    installed = packages_distributions()
    names = {*user_modules, *(name for source in sources.values() for name in _imported(source))}
    packages = {name.partition(".")[0] for name in names}
    return sorted({name for package in packages for name in installed.get(package, ())})


def _imported(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module

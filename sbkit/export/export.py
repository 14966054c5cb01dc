"""Export a run: write its best checkpoint as a bundle, and what else is asked for.

Nothing in the run's YAML is run: its parts are described as plain data.
"""

import inspect
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml.comments import CommentedMap
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.checksums import checksum, find_damage, write_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.files import building, fsync_tree, require_writable, to_json
from sbkit.base.messages import listed
from sbkit.base.units import SAMPLE_RATE
from sbkit.base.versions import versions
from sbkit.bundle.config import CONFIG_FILE, FORMAT, WEIGHTS_FILE
from sbkit.bundle.module_spec import ARGUMENTS, to_plain
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.provenance import make_provenance, read_json, to_safetensors
from sbkit.checkpoint.run_config import CHECKPOINTS, RESOLVED, read_run_config
from sbkit.checkpoint.weights import part_names_in
from sbkit.config.document import read_document, tag_of
from sbkit.decoding.confidence import CONFIDENCE_FILE
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.evaluate.utterances import PROVENANCE
from sbkit.export.model_card import LICENCE_UNKNOWN, TRANSFORMERS, model_card
from sbkit.export.parity import WHOLE, Grid
from sbkit.export.traced import TrainedModel
from sbkit.export.user_modules import describe_recipes, distributions, source_files
from sbkit.export.write import (
    HUB,
    HUGGINGFACE,
    ParityReports,
    require_formats,
    write_formats,
    write_hub,
)
from sbkit.models.pretrained.parts import PretrainedEncoder
from sbkit.runtime.torch_model import load_bundle
from sbkit.tasks.task import Task, load_task

logger = logging.getLogger(__name__)

CARD = "README.md"
ADAPTED = f"{PretrainedEncoder.__module__}.{PretrainedEncoder.__name__}"


def export_run(
    run: Path,
    out: Path,
    *,
    formats: Sequence[str] = (),
    licence: str = LICENCE_UNKNOWN,
    grid: Grid = WHOLE,
    user_modules: frozenset[str] = frozenset(),
) -> ParityReports:
    """Write the best checkpoint of a run as a bundle, whole or not at all, and its formats.

    ``licence`` is for the model's card; formats are compared with the trained model on ``grid``;
    ``user_modules`` (those that `--import` names) hold parts of the model, or its task. A format
    that misses its limits is not written; its parity report, which is returned, says why.
    Raises SbkitError when ``run`` is no run folder, has no good checkpoint, or names what is not
    on the list, and when ``out`` holds anything but an earlier bundle, which is replaced.
    """
    require_formats(formats)
    out = out.resolve()
    if not (run / RESOLVED).is_file():
        raise SbkitError(
            f"A run must be a folder with {RESOLVED}, but {run} is none. "
            "Name the folder that training printed, such as results/ctc/en/3407."
        )
    require_free(out)
    contents, config = _contents(run, user_modules)
    require_writable(out.parent, option="--out")
    with building(out) as beside:
        for name, content in contents.items():
            (beside / name).write_bytes(content)
        write_checksums(beside)
        bundle = load_bundle(
            beside, user_modules=user_modules
        )  # what cannot be loaded is not exported
        parity: ParityReports = {}
        if compared := [name for name in formats if name != HUB]:
            trained = TrainedModel(bundle, user_modules)
            parity = write_formats(trained, run, beside, compared, grid)
        there = [name for name in formats if _is_written(parity.get(name))]
        card = model_card(run, bundle.task, config, there, licence=licence)
        (beside / CARD).write_text(card, encoding="utf-8")
        if HUGGINGFACE in there:
            card = model_card(run, bundle.task, config, [], licence=licence, library=TRANSFORMERS)
            (beside / HUGGINGFACE / CARD).write_text(card, encoding="utf-8")
            write_checksums(beside / HUGGINGFACE)
        write_checksums(beside)
        if HUB in formats:
            write_hub(beside)
        fsync_tree(beside)
        shutil.rmtree(out, ignore_errors=True)
    return parity


@contextmanager
def as_bundle(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Name the folder of a bundle, or make one of a run in a temporary folder."""
    if (model / CONFIG_FILE).exists() or not (model / RESOLVED).is_file():
        yield model
        return
    with TemporaryDirectory() as folder:
        export_run(model, Path(folder, "bundle"), user_modules=user_modules)
        yield Path(folder, "bundle")


def _is_written(parity: Mapping[str, Any] | None) -> bool:
    return parity is None or any(each["written"] for each in parity.values())


def require_free(out: Path) -> None:
    """Raise SbkitError unless a folder is new, or empty, or a bundle as it was exported."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    why: str | None = "it is no bundle"
    if (out / CONFIG_FILE).is_file():
        folders = [out, *(each for each in out.iterdir() if each.is_dir())]
        found = ((each.name, find_damage(each)) for each in folders)
        why = next((f"in {name}, {damage}" for name, damage in found if damage), None)
    if why is not None:
        raise SbkitError(
            f"--out must be a new folder, or an earlier bundle as it was exported, but {out} holds "
            f"something else: {why}. Choose another folder."
        )


def _contents(run: Path, user_modules: frozenset[str]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Collect the files of a bundle, and its configuration."""
    best, root = best_checkpoints(run / CHECKPOINTS), read_document(run / RESOLVED).root
    task = _task_of(best[0], user_modules)
    contents, labels = _read_labels(run, task)
    contents |= (sources := source_files(user_modules))
    for note in describe_recipes(sources):
        logger.info(note)
    kept = _kept_parts(root, task)
    described = plain_parts(root, {task.labels.key: labels} if task.labels else {}, task)
    decoder = read_json(run / DECODER_FILE)  # that the test was run with
    if decoder is not None:
        contents[LANGUAGE_MODELS] = (run / LANGUAGE_MODELS).read_bytes()
    elif "decoder" in root and (run / LANGUAGE_MODELS).exists():
        logger.warning(
            "note: the weights of this run's decoder are not chosen yet, so that it decodes "
            f"greedily. Finish the run, or choose them: sbkit tune {run}"
        )
    weights = to_safetensors(best)
    contents[WEIGHTS_FILE] = weights if kept is None else to_safetensors(best, kept)
    confidence, models = read_json(run / CONFIDENCE_FILE), contents.get(LANGUAGE_MODELS)
    config = {
        "format": FORMAT,
        "task": task.name,
        "sample_rate": root.get("sample_rate", SAMPLE_RATE),
        **described,
        "decoder": decoder,
        "confidence": confidence,
        PROVENANCE: make_provenance(
            weights=weights, decoder=decoder, language_models=models, confidence=confidence
        ),
        "checkpoints": [
            {name: each.meta[name] for name in ("epoch", *task.metrics) if name in each.meta}
            for each in best
        ],
        NORMALIZER: best[0].meta.get(NORMALIZER),
        "versions": versions(distributions(user_modules, sources)),
        **({"user_modules": sorted(user_modules)} if user_modules else {}),
        **({"language": str(root["language"])} if "language" in root else {}),
    }
    contents[CONFIG_FILE] = (to_json(config, indent=1) + "\n").encode()
    return contents, config


def _task_of(checkpoint: Checkpoint, user_modules: frozenset[str]) -> Task:
    if TASK not in checkpoint.meta:
        raise SbkitError(
            f"A checkpoint must name the task of its run to be exported, but {checkpoint.path} "
            "does not. Train with train.py and a recipe, which names it."
        )
    return load_task(checkpoint.meta[TASK], user_modules=user_modules)


def change_config(bundle: Path, **values: object) -> None:
    """Change values in config.json of a bundle, and of its copy for a hub where there is one."""
    for folder in (bundle, bundle / HUB):
        if (folder / CONFIG_FILE).exists():
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            text = to_json(config | values, indent=1) + "\n"
            (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
            write_checksums(folder)


def best_checkpoints(folder: Path) -> list[Checkpoint]:
    """Find the undamaged checkpoints that the test was run with, or the best one on dev.

    Raises SbkitError when there is none.
    """
    best = Checkpointer(folder).find_averaged() if folder.is_dir() else []
    if not best:
        raise SbkitError(
            f"A run must have a whole checkpoint to be exported, but {folder} has none. "
            "Train it first: torchrun train.py hparams/ctc.yaml"
        )
    return best


def _kept_parts(root: CommentedMap, task: Task) -> list[int] | None:
    """Number the parts that a bundle has; None for all."""
    names = enumerate(part_names_in(root))
    kept = [number for number, name in names if name not in task.require_export().training_parts]
    return kept if task.require_export().training_parts else None


def plain_parts(root: CommentedMap, objects: Mapping[str, object], task: Task) -> dict[str, Any]:
    """Describe the parts as plain data, and the order in which the ModuleList owns them.

    They are what the ModuleList lists, and what else the task's model takes of the YAML. The
    attributes of ``objects`` of the YAML, by their keys, may be referred to.

    Raises SbkitError when a part is made of something else than a description, or is none of the
    model's.
    """
    owned = [
        name for name in part_names_in(root) if name not in task.require_export().training_parts
    ]
    taken = inspect.signature(task.require_export().import_model_class()).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    strange = [name for name in owned if name not in (root if takes_any else taken)]
    if strange:
        raise SbkitError(
            f"`model` must list only parts that {task.model_class} takes, each under its own key, "
            f"but lists {listed(strange)}. Remove unused parts, or make them parts of the others."
        )
    others = [name for name in taken if name != "model" and tag_of(root.get(name))]
    by_node = {id(root.get(key)): made for key, made in objects.items() if made is not None}
    names = dict.fromkeys([*owned, *others])
    parts: Any = {name: to_plain(root[name], key=name, objects=by_node) for name in names}
    for each in parts.values():
        if each.get("new") == ADAPTED and "lora" in each[ARGUMENTS]:
            each[ARGUMENTS]["lora"] = None  # its weights have the adapters merged
    return {"model": owned, "parts": parts}


def _read_labels(run: Path, task: Task) -> tuple[dict[str, bytes], Any]:
    """Read the file of labels that the model was trained with: as a bundle has it, and as labels.

    Raises SbkitError where it is another one.
    """
    if task.labels is None:
        return {}, None
    file = run / task.labels.name
    if read_run_config(run).labels != checksum(file):
        raise SbkitError(
            f"{file} must be the one that the run was trained with, but is another: what the model "
            "predicts would go by other names. Put it back."
        )
    content = file.read_bytes()
    return {file.name: content}, task.labels.read(file, content)

"""Export a run: write its best checkpoint as a bundle, and what else is asked for.

Nothing in the run's YAML is run: its parts are described as plain data.
"""

import inspect
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap
from safetensors.torch import save
from speechbrain.utils.checkpoints import Checkpoint
from torch.nn import ModuleList

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.text import listed, versions
from sbkit.base.units import SAMPLE_RATE
from sbkit.checkpoint.checkpointer import NORMALIZER, TASK, Checkpointer
from sbkit.checkpoint.declaration import CHECKPOINTS, RESOLVED, read_declaration
from sbkit.checkpoint.integrity import checksum, write_checksums
from sbkit.checkpoint.part_names import part_names_in
from sbkit.checkpoint.weights import average
from sbkit.config.allowed import find
from sbkit.config.document import read_document, tag_of
from sbkit.decoding.confidence import CONFIDENCE_FILE
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.evaluate.run_results import SUMMARY
from sbkit.inference.bundle.bundle import CONFIG, WEIGHTS
from sbkit.inference.bundle.config import FORMAT
from sbkit.inference.bundle.model_card import LICENCE_UNKNOWN, model_card
from sbkit.inference.bundle.module_spec import to_plain
from sbkit.inference.bundle.place import CARD, HUB, replacing, require_free
from sbkit.inference.formats.held_out import HeldOut, find_held_out
from sbkit.inference.formats.parity import Grid
from sbkit.inference.formats.traced import TrainedModel
from sbkit.inference.formats.write import Certificates, require_formats, write_formats
from sbkit.inference.runtime.torch_model import load_bundle
from sbkit.tasks.task import Task, load_task

KNOBS = ("language", "token_type")  # of the YAML, said again in the bundle


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written besides the bundle itself.

    Attributes:
        formats: names of `sbkit.inference.formats.write.WRITERS`.
        licence: of the model, for its card.
        grid: on which formats are compared with the trained model.
    """

    formats: Sequence[str] = ()
    licence: str = LICENCE_UNKNOWN
    grid: Grid = field(default_factory=Grid)


def export_run(
    run: Path, out: Path, options: ExportOptions | None = None, *, own: frozenset[str] = frozenset()
) -> Certificates:
    """Write the best checkpoint of a run as a bundle, whole or not at all, and its formats.

    ``own`` names modules of the user's that hold parts of the model, or its task. A format that
    misses its limits is not written; its certificate, which is returned, says why.
    Raises SbkitError when ``run`` is no run folder, has no good checkpoint, or names what is not
    on the list, and when ``out`` exists and is not a bundle.
    """
    options = options or ExportOptions()
    require_formats(options.formats)
    _require_run(run)
    require_free(out)
    contents, config = _contents(run, own)
    with replacing(out) as beside:
        for name, content in contents.items():
            (beside / name).write_bytes(content)
        write_checksums(beside)
        bundle = load_bundle(beside, own=own)  # what cannot be loaded is not exported
        certificates: Certificates = {}
        if options.formats:
            certificates = write_formats(
                TrainedModel(bundle, own), beside, options.formats, _held_out(run), options.grid
            )
        card = model_card(run, bundle.task, config, certificates, licence=options.licence)
        _write_into_both(beside, CARD, card)
    return certificates


def _contents(run: Path, own: frozenset[str]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Collect the files of a bundle, and its configuration."""
    best = best_checkpoints(run / CHECKPOINTS)
    task = _task_of(best[0], own)
    root = read_document(run / RESOLVED).root
    contents, labels = _read_labels(run, task, best[0])
    described = plain_parts(root, {task.labels.key: labels} if task.labels else {}, task)
    decoder = _read_json(run / DECODER_FILE)  # that the test was run with
    config = {
        "format": FORMAT,
        "task": task.name,
        "sample_rate": root.get("sample_rate", SAMPLE_RATE),
        "labels": task.labels and task.labels.names(labels),
        **described,
        "decoder": decoder,
        "confidence": _read_json(run / CONFIDENCE_FILE),
        "checkpoints": [
            {name: each.meta[name] for name in ("epoch", *task.metrics) if name in each.meta}
            for each in best
        ],
        NORMALIZER: best[0].meta.get(NORMALIZER),
        "versions": versions(),
        **{name: str(root[name]) for name in KNOBS if name in root},
    }
    contents[CONFIG] = (to_json(config, indent=1) + "\n").encode()
    if "transcribe" in task.commands:
        _note_untuned(run, config, has_decoder="decoder" in root)
    if decoder is not None:
        contents[LANGUAGE_MODELS] = (run / LANGUAGE_MODELS).read_bytes()
    weights = average(best, "model")
    contents[WEIGHTS] = save({name: value.clone() for name, value in weights.items()})
    return contents, config


def _task_of(checkpoint: Checkpoint, own: frozenset[str]) -> Task:
    """Import the task that a checkpoint was trained for."""
    name = checkpoint.meta.get(TASK)
    if not isinstance(name, str):
        raise SbkitError(
            f"A checkpoint must name the task of its run to be exported, but {checkpoint.path} "
            "does not. Train with train.py and a recipe, which names it."
        )
    return load_task(name, own=own)


def _note_untuned(run: Path, config: Mapping[str, Any], *, has_decoder: bool) -> None:
    """Print what a recognizer lacks that is chosen when its training ends.

    Raises SbkitError for a tested run that would decode otherwise than it was tested.
    """
    if has_decoder and config["decoder"] is None and (run / LANGUAGE_MODELS).exists():
        if (run / SUMMARY).exists():
            raise SbkitError(
                f"A run that was tested with language models must hold {DECODER_FILE}, but {run} "
                f"does not, and would decode greedily. Write it again: sbkit tune {run}"
            )
        lacking = "the weights of this run's decoder are not chosen yet, so that it decodes "
        lacking += "greedily. Finish the run, or choose them"
    elif config["confidence"] is None:
        lacking = f"this run has no {CONFIDENCE_FILE}, so that its words get no confidences. "
        lacking += "Finish the run, or fit them"
    else:
        return
    print(f"note: {lacking}: sbkit tune {run}", file=sys.stderr)


def _held_out(run: Path) -> HeldOut | str:
    """Find the run's test sets, or say why they are not there."""
    try:
        return find_held_out(run)
    except SbkitError as error:
        return str(error)


def change_config(bundle: Path, **values: object) -> None:
    """Write a bundle, and its copy for a hub, again with other values in config.json.

    It is written whole or not at all.
    """
    config = json.loads((bundle / CONFIG).read_text(encoding="utf-8"))
    with replacing(bundle) as beside:
        shutil.copytree(bundle, beside, dirs_exist_ok=True)
        _write_into_both(beside, CONFIG, to_json(config | values, indent=1) + "\n")
        load_bundle(beside)


def _write_into_both(bundle: Path, name: str, text: str) -> None:
    """Write a file of a bundle, and of its copy for a hub where there is one."""
    for folder in (bundle, bundle / HUB):
        if (folder / CONFIG).exists():
            (folder / name).write_text(text, encoding="utf-8")
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


def plain_parts(root: CommentedMap, objects: Mapping[str, object], task: Task) -> dict[str, Any]:
    """Describe the parts as plain data, and the order in which the ModuleList owns them.

    They are what the ModuleList lists, and what else the task's model takes of the YAML. The
    attributes of ``objects`` of the YAML, by their keys, may be referred to.

    Raises SbkitError when a part is made of something else than a description, or is none of the
    model's.
    """
    owned, taken = _owned(root), inspect.signature(task.import_model()).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    strange = [] if takes_any else [name for name in owned if name not in taken]
    if strange:
        raise SbkitError(
            f"`model` must list the parts that {task.model_class} takes, each under a key of its "
            f"own, but has {listed(strange)}. Take out what is not used, or put it into one of "
            "them."
        )
    others = [name for name in taken if name != "model" and tag_of(root.get(name))]
    by_node = {id(root.get(key)): made for key, made in objects.items() if made is not None}
    names = dict.fromkeys([*owned, *others])
    parts = {name: to_plain(root[name], key=name, objects=by_node) for name in names}
    return {"model": owned, "parts": parts}


def _owned(root: CommentedMap) -> list[str]:
    """Name the parts that the ModuleList owns."""
    node = root.get("model")
    if find(tag_of(node).removeprefix("!new:")) is not ModuleList:
        raise SbkitError(
            f"`model` must be a torch.nn.ModuleList, but is {tag_of(node) or 'something else'}. "
            "Write `model: !new:torch.nn.ModuleList`."
        )
    return part_names_in(root)


def _read_labels(run: Path, task: Task, best: Checkpoint) -> tuple[dict[str, bytes], Any]:
    """Read the file of labels that the model was trained with: as a bundle has it, and as labels.

    Raises SbkitError where it is gone, or another one.
    """
    if task.labels is None:
        return {}, None
    file = run / task.labels.name
    if not file.is_file():
        raise SbkitError(
            f"A run must hold the file of labels that it was trained with, but {file} is gone. Put "
            "it back: what the model predicts goes by its names."
        )
    if read_declaration(run).labels != checksum(file):
        raise SbkitError(
            f"{file} must be the one that the run was trained with, but is another: what the model "
            "predicts would go by other names. Put it back."
        )
    content = file.read_bytes()
    return {file.name: content}, task.labels.read(file, content)


def _read_json(file: Path) -> Any:
    """Read what training wrote beside its checkpoints; None where it wrote nothing."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _require_run(run: Path) -> None:
    if not (run / RESOLVED).is_file():
        raise SbkitError(
            f"A run must be a folder with {RESOLVED}, but {run} is none. "
            "Name the folder that training printed, such as results/ctc/en/3407."
        )

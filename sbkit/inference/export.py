"""From a run folder to a bundle."""

from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap
from safetensors.torch import save
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.errors import SbkitError
from sbkit.base.files import building, to_json
from sbkit.base.provenance import versions
from sbkit.base.units import SAMPLE_RATE
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.integrity import write_checksums
from sbkit.checkpoint.weights import average
from sbkit.config.document import read_document
from sbkit.inference.bundle import CONFIG, FORMAT, PARTS, TOKENIZER, WEIGHTS, load_bundle
from sbkit.inference.module_spec import to_plain
from sbkit.text.tokenizer import Tokenizer

KNOBS = ("language", "token_type")  # of the YAML, said again in the bundle


def export_run(run: Path, out: Path) -> None:
    """Write the best checkpoint of a run as a bundle, whole or not at all.

    Raises SbkitError when ``run`` is no run folder, has no good checkpoint, or ``out`` exists and
    is not a bundle.
    """
    _check_folders(run, out)
    document = read_document(run / "hyperparams.yaml")
    tokenizer = Tokenizer(model_file=run / TOKENIZER)
    best = best_checkpoints(run / "checkpoints", tokenizer)
    config = {
        "format": FORMAT,
        "sample_rate": SAMPLE_RATE,
        "checkpoints": [
            {name: each.meta.get(name) for name in ("epoch", "CER", "WER")} for each in best
        ],
        "versions": versions(),
        **{name: document.root[name] for name in KNOBS if name in document.root},
        **plain_parts(document.root, tokenizer),
    }
    with building(out, replace=True) as beside:
        (beside / CONFIG).write_text(to_json(config, indent=1) + "\n", encoding="utf-8")
        (beside / TOKENIZER).write_bytes((run / TOKENIZER).read_bytes())
        weights = {name: value.clone() for name, value in average(best, "model").items()}
        (beside / WEIGHTS).write_bytes(save(weights))
        write_checksums(beside)
        load_bundle(beside)  # what cannot be loaded is not exported


def best_checkpoints(folder: Path, tokenizer: Tokenizer) -> list[Checkpoint]:
    """Find the undamaged checkpoints that the test was run with, or the one of the lowest CER.

    Raises SbkitError when there is none, or one was trained with another tokenizer.
    """
    best: list[Checkpoint] = []
    if folder.is_dir():
        best = Checkpointer(folder, tokenizer=tokenizer).find_averaged(min_key="CER")
    if not best:
        raise SbkitError(
            f"A run must have a whole checkpoint to be exported, but {folder} has none. "
            "Train it first: torchrun train.py hparams/ctc.yaml"
        )
    return best


def plain_parts(root: CommentedMap, tokenizer: Tokenizer) -> dict[str, Any]:
    """Give the parts as plain data, and the order in which the ModuleList owns them."""
    objects = {id(root.get("tokenizer")): tokenizer}
    names = (*PARTS, "compute_features")
    missing = [name for name in (*names, "model") if name not in root]
    if missing:
        raise SbkitError(
            f"The run's hyperparams.yaml must define {', '.join(names)} and model, but has no "
            f"{', '.join(missing)}. Export works for runs of train.py."
        )
    by_node = {id(root[name]): name for name in PARTS}
    owned = [by_node.get(id(node), "another part") for node in root["model"][0]]
    if {*owned} != {*PARTS}:
        raise SbkitError(
            f"`model` must be a list of {', '.join(PARTS)} to be exported, but is one of "
            f"{', '.join(owned)}. Take out what is not used, or put what is into one of them."
        )
    parts = {name: to_plain(root[name], key=name, objects=objects) for name in names}
    return {"model": owned, "parts": parts}


def _check_folders(run: Path, out: Path) -> None:
    if not (run / "hyperparams.yaml").is_file():
        raise SbkitError(
            f"The run to export must be a run folder with hyperparams.yaml, but {run} is none. "
            "Name the folder that training printed, such as results/ctc/3407."
        )
    if out.exists() and not (out / CONFIG).is_file() and any(out.iterdir()):
        raise SbkitError(
            f"--out must be a new folder or an earlier bundle, but {out} holds something else. "
            "Choose another folder."
        )

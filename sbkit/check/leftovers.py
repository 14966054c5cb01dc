"""What the run folder holds already, and whether what is trained can be resumed and exported.

The folder is only read. An export is tried before there is anything to export: the parts as plain
data and back, on the meta device, which has sizes but no numbers.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.check.finding import Finding, words_of
from sbkit.check.rehearsal import rehearse
from sbkit.check.subject import Subject
from sbkit.machine.document import read_document
from sbkit.machine.hparams import read_knobs, save_resolved
from sbkit.out.bundle import PARTS, TOKENIZER, build_graph
from sbkit.out.export import plain_parts
from sbkit.out.outcome import PREDICTION
from sbkit.out.plain import TRUSTED
from sbkit.state.checkpoint import Checkpointer
from sbkit.state.integrity import checksum
from sbkit.state.weights import modules_of, read_weights, refuse_other_model
from sbkit.tensors.log import quiet
from sbkit.values.errors import SbkitError

NAME = "leftovers"
RESOLVED, CHECKPOINTS = "hyperparams.yaml", "checkpoints"
OF_A_RUN = (RESOLVED, CHECKPOINTS, "check", "left_out.tsv", TOKENIZER, PREDICTION)
# Knobs that a run may be resumed with in another way, and still be the run that it says it is.
MAY_CHANGE = {
    *("output_folder", "device", "precision", "eval_precision", "check", "data_folder"),
    *("eval_batch_seconds", "grad_accumulation_factor", "num_workers", "log_every"),
    *("number_of_epochs", "average_checkpoints", "ckpt_interval_minutes"),
    *("nonfinite_patience", "stall_seconds"),
}
FRAMES = 100  # of features in the dry export
SHOWN = 3


def check_run_folder(subject: Subject) -> Iterator[Finding]:
    """Find a run folder that cannot be written to, or that holds something else than this run."""
    folder = subject.run_folder
    if folder is None or not folder.exists():
        return
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield subject.finding(
            NAME,
            "output_folder",
            declared=f"output_folder: {folder}",
            effect="it is no folder to write to, so nothing could be saved",
            mend="Choose another --output_folder.",
        )
        return
    yield from _find_foreign(subject, folder)
    newest = newest_checkpoint(folder)
    if newest is not None:
        yield from _find_other_knobs(subject, folder)
        yield from _find_other_tokenizer(subject, folder, newest)
        yield from _find_other_model(subject, newest)


def check_export(subject: Subject) -> Iterator[Finding]:
    """Find what `sbkit export`, or an exporter that traces the model, would refuse."""
    if not {*PARTS, "model", "compute_features"} <= {*subject.document.root}:
        return
    if rehearse(subject).broken or rehearse(subject).misfits:
        return  # what does not run cannot be exported either, and is told
    try:
        config = _plain(subject)
    except SbkitError as error:
        key = next((key for key in PARTS if f"`{key}`" in str(error)), "model")
        yield subject.finding(NAME, key, **words_of(str(error)))
        return
    yield from _find_distrusted(subject, config)
    yield from _find_untraceable(subject, config)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Find the checkpoint that a run would be resumed from, read only.

    Raises SbkitError when there are some, and all are damaged.
    """
    if not (folder / CHECKPOINTS).is_dir():
        return None
    with quiet():  # the run will say which ones are damaged
        return next(iter(Checkpointer(folder / CHECKPOINTS).find_whole(1)), None)


def _find_foreign(subject: Subject, folder: Path) -> Iterator[Finding]:
    there = sorted(each.name for each in folder.iterdir())
    if there and not any((folder / name).exists() for name in OF_A_RUN):
        yield subject.finding(
            NAME,
            "output_folder",
            declared=f"output_folder: {folder}",
            effect=f"it is no run but holds {', '.join(there[:SHOWN])}: a run would be mixed into "
            "it",
            mend="Choose another --output_folder.",
            stops=False,
        )


def _find_other_knobs(subject: Subject, folder: Path) -> Iterator[Finding]:
    """Compare the knobs of the run that is there with those that it would be resumed with."""
    if not (folder / RESOLVED).is_file():
        return
    before, now = read_knobs(folder / RESOLVED, {}), subject.knobs
    keys = [key for key in now.keys() | before.keys() if key not in MAY_CHANGE]
    other = [key for key in sorted(keys) if before.get(key) != now.get(key)]
    if other:
        shown = "; ".join(f"{key}: {before.get(key)} there, {now.get(key)} here" for key in other)
        yield subject.finding(
            NAME,
            next((key for key in other if key in now), "output_folder"),
            declared=f"a run that goes on from the checkpoints of {folder}",
            effect=f"{len(other)} knobs were others when it began ({shown})",
            mend="Take its values, or choose another --output_folder for a new run.",
            stops=False,
        )


def _find_other_tokenizer(subject: Subject, folder: Path, newest: Checkpoint) -> Iterator[Finding]:
    expected = newest.meta.get("tokenizer")
    file = folder / TOKENIZER
    if expected is not None and (not file.is_file() or checksum(file) != expected):
        yield subject.finding(
            NAME,
            "tokenizer",
            declared=f"the tokenizer that {newest.path.name} was trained with",
            effect=f"{file} is {'another one' if file.is_file() else 'not there'}: what the model "
            "writes would be read as other letters",
            mend="Put the file back, or choose another --output_folder.",
        )


def _find_other_model(subject: Subject, newest: Checkpoint) -> Iterator[Finding]:
    for name, module in modules_of(subject.hparams["checkpointer"]).items():
        if name in newest.paramfiles:
            try:
                saved = read_weights(newest.paramfiles[name])
                refuse_other_model(saved, module.state_dict(), of=str(newest.path))
            except SbkitError as error:
                yield subject.finding(NAME, name, **words_of(str(error)))


def _plain(subject: Subject) -> dict[str, Any]:
    file = Path(subject.building_knobs["output_folder"]) / RESOLVED
    save_resolved(file, subject.yaml_file, subject.building_overrides)
    config = plain_parts(read_document(file).root, subject.hparams["tokenizer"])
    described: dict[str, Any] = json.loads(json.dumps(config))
    return described


def _find_distrusted(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
    for key, part in config["parts"].items():
        strange = [name for name in _names(part) if not name.startswith(TRUSTED)]
        if strange:
            yield subject.finding(
                NAME,
                key,
                declared=f"`{key}`, made of {', '.join(strange)}",
                effect="`sbkit export` builds nothing but modules of "
                f"{', '.join(place[:-1] for place in TRUSTED)}",
                mend="Import its module before you export, from Python.",
                stops=False,
            )


def _names(plain: Any) -> Iterator[str]:
    if isinstance(plain, dict):
        yield from (plain[kind] for kind in ("new", "name") if kind in plain)
        plain = list(plain.values())
    for each in plain if isinstance(plain, list) else ():
        yield from _names(each)


def _find_untraceable(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Run the model for inference where there are no numbers to decide upon."""
    brain = subject.brain
    with torch.no_grad():
        features, _ = brain.graph.features(torch.zeros(1, 1600), torch.tensor([1600]))
        try:
            with torch.device("meta"):
                graph = build_graph(config, brain.graph.labels)
                like = torch.zeros(2, FRAMES, features.shape[-1])
                states, _ = graph.encode(like, torch.tensor([FRAMES, FRAMES // 2]))
                graph.ctc_log_probs(states)
        except (RuntimeError, NotImplementedError) as error:
            yield subject.finding(
                NAME,
                _part_of(error, config),
                declared="a model that can be exported",
                effect="what it does depends on numbers that an exporter does not have "
                f"({str(error).splitlines()[0]})",
                mend="Compute with tensors instead of `if`, `.item()` or `int()` of a tensor.",
                stops=False,
            )


def _part_of(error: BaseException, config: Mapping[str, Any]) -> str:
    """Name the part in whose class the error was raised, as far as that can be told."""
    files = set()
    trace = error.__traceback__
    while trace is not None:
        files.add(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
    homes = {key: config["parts"][key]["new"].rpartition(".")[0] for key in PARTS}
    return next((key for key, home in homes.items() if home in files), "model")

"""`sbkit replay`: run a batch that was not finite once more, alone, and name where it began.

Legend: B utterances.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.check.planned_run import MissingPartError, PlannedRun, Recipe
from sbkit.checkpoint.rng import TorchState, restore_torch_state
from sbkit.checkpoint.weights import refuse_other_model
from sbkit.config.judge import refuse_foreign
from sbkit.data.batch import Batch
from sbkit.distributed.device import Placement, resolve
from sbkit.train.nonfinite import FOLDER, KEPT
from sbkit.train.step import as_loss

REPRODUCED = 1  # exit code
LARGEST_RECORD, LARGEST_KEPT = 1 << 24, 1 << 36  # bytes
# What another kind of JSON or of a pickle, or a part of one, ends in.
UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, TypeError, EOFError, PickleError)


@dataclass
class Trace:
    """What was first not finite on the way forward, on the way back, and among the losses."""

    forward: str | None = None
    backward: str | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Tell whether nothing was wrong."""
        return self.forward is None and self.backward is None and all(map(_is_finite, self.losses))


def replay_file(file: Path, recipe: Recipe | None, *, own: frozenset[str] = frozenset()) -> int:
    """Print which utterance and which module were first not finite; return 1 if any was.

    The run's YAML is built, so it may name only what is on sbkit's list, or what is defined in the
    modules that ``own`` names.
    Raises SbkitError for a file that training did not write, or one without what a replay needs.
    """
    record, modules, micro_batches = _read(file)
    run_folder = file.resolve().parent.parent
    refuse_foreign(run_folder / "hyperparams.yaml", own=own)
    here = {"output_folder": str(run_folder)}
    with PlannedRun(run_folder / "hyperparams.yaml", here, recipe=recipe) as planned:
        brain = _brain(planned)
        refuse_other_model(modules, brain.modules.state_dict(), of=str(file.with_suffix(".pt")))
        brain.modules.load_state_dict(modules)
        with _replaying(file):
            found = [_tell(brain, batch, random) for batch, random in micro_batches]
    if any(found):
        return REPRODUCED
    print(
        f"Everything was finite here, on {brain.device} in {brain.precision}; it was not in "
        f"training ({record})."
    )
    return 0


def _tell(brain: Any, batch: Batch, random: TorchState) -> bool:
    """Run a batch whole and each of its utterances alone, and say what is not finite."""
    whole = trace(brain, batch, random)
    if whole.is_finite:
        return False
    print(f"The batch of {len(batch)} utterances: {_words(whole)}")
    for row, name in enumerate(batch.ids):
        one = trace(brain, batch.select(row), random)
        lost = not _is_finite(whole.losses[row])
        if lost or not one.is_finite:
            print(f"  {name} ({one_line(batch, row)}): alone, {_words(one)}")
    return True


def one_line(batch: Batch, row: int) -> str:
    """Return an utterance's lengths and text."""
    samples, count = int(batch.samples[row]), int(batch.token_lengths[row])
    return f"{samples} samples, {count} labels, {batch.texts[row]!r}"


def trace(brain: Any, batch: Batch, random: TorchState) -> Trace:
    """Take the step's forward and backward once, and watch every module."""
    found = Trace()
    restore_torch_state(random, brain.device)
    brain.modules.train()
    brain.modules.zero_grad(set_to_none=True)
    batch = batch.to(brain.device)
    with _watched(brain.modules, found):
        with brain.training_ctx:
            outputs = brain.compute_forward(batch, Stage.TRAIN)
            loss = as_loss(brain.compute_objectives(outputs, batch, Stage.TRAIN))
        found.losses = loss.sums.tolist()
        torch.autograd.backward(loss.sums.sum())
    for name, parameter in brain.modules.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            found.backward = found.backward or f"the gradient of {name}"
    return found


@contextmanager
def _watched(modules: nn.Module, found: Trace) -> Iterator[None]:
    """Note the first module whose output, and the first whose gradient, is not finite."""

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if found.forward is None and not _all_finite(output):
                found.forward = f"the output of {name}"
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    hooked: Any = tensor
                    hooked.register_hook(partial(look_back, name))

        return look

    def look_back(name: str, gradient: Tensor) -> None:
        if found.backward is None and not _all_finite(gradient):
            found.backward = f"the gradient that comes back to the output of {name}"

    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if not any(module.children()):
                hooks.enter_context(_removed(module.register_forward_hook(watch(name))))
        yield


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _all_finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value))


def _is_finite(loss: float) -> bool:
    return abs(loss) < float("inf")


def _words(found: Trace) -> str:
    """Say where it began."""
    if found.is_finite:
        return "everything is finite"
    lost = sum(not _is_finite(loss) for loss in found.losses)
    places = [
        found.forward,
        f"the loss of {lost} of {len(found.losses)}" if lost else None,
        found.backward,
    ]
    return "not finite: " + ", then ".join(place for place in places if place)


def _brain(planned: PlannedRun) -> Any:
    try:
        return planned.make_brain(placement_here(planned))
    except MissingPartError as error:
        raise next(
            iter(planned.faults.values()),
            SbkitError(
                "A replay needs the training script that made the run, but there is none. Pass "
                "--script=PATH/train.py; the .json holds the whole command as `replay`."
            ),
        ) from error


def placement_here(planned: PlannedRun) -> Placement:
    """Take the run's device where there is one, else the CPU, in a precision that it has."""
    with suppress(MissingPartError):
        there: Placement = planned.placement
        return there
    precision = planned.knobs.get("precision", "fp32")
    return resolve("cpu", "bf16" if precision == "fp16" else precision)


@contextmanager
def _replaying(file: Path) -> Iterator[None]:
    """Refuse micro-batches that the model cannot run, whatever error they end in."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        raise _unreadable(file, error) from error


def _read(file: Path) -> tuple[str, dict[str, Tensor], list[tuple[Batch, TorchState]]]:
    """Read what was not finite and in which step, the model, and the step's micro-batches."""
    kept = read_regular(file, largest=LARGEST_RECORD, what="What is replayed")
    try:
        record = json.loads(kept)
        if not isinstance(record, dict):
            raise ValueError("it holds no record")
        tensors = read_regular(
            file.with_suffix(".pt"), largest=LARGEST_KEPT, what="What is replayed, its .pt,"
        )
        saved = torch.load(BytesIO(tensors), "cpu", weights_only=True)
        micro_batches = [(_batch(each["batch"]), each["random"]) for each in saved["micro_batches"]]
        if not micro_batches:
            raise ValueError("it holds no micro-batches")
        what, step = printable(str(record["what"])), int(record["step"])
        return f"its {what}, step {step}", {**saved["modules"]}, micro_batches
    except (*UNREADABLE, AttributeError, RecursionError) as error:
        raise _unreadable(file, error) from error


def _batch(plain: Mapping[str, Any]) -> Batch:
    """Make a batch of what was kept; raises ValueError when its counts are not of one batch."""
    batch = Batch.from_plain(plain)
    played = sum(group.utterances for group in batch.speed_groups)
    rows = {len(batch.ids), len(batch.texts), len(batch.audio), len(batch.samples), played}
    if rows != {len(batch.ids)} or not batch.ids:
        raise ValueError("its lists are not of one length")
    if min(group.utterances for group in batch.speed_groups) < 1:
        raise ValueError("it plays a group of no utterances")
    if int(batch.samples.max()) > batch.audio.shape[1]:
        raise ValueError("its audio is shorter than its lengths")
    return batch


def _unreadable(file: Path, error: Exception) -> SbkitError:
    why = printable(str(error).partition("\n")[0].partition(". ")[0])  # torch's go on to bad advice
    return SbkitError(
        f"What is replayed must be one of the .json files of a run's {FOLDER}/ folder with its "
        f".pt beside it, but {file} is not ({why or type(error).__name__}). Name such a file; the "
        f"newest {KEPT} of each rank can be replayed."
    )

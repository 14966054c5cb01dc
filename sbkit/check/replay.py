"""`sbkit replay`: run a batch that was not finite once more, alone, and name where it began.

Legend: B utterances.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.base.text import printable
from sbkit.check.model.watch import tensors_in
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.comparison import refuse_other_model
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.checkpoint.integrity import reading
from sbkit.checkpoint.rng import TorchState, check_torch_state, restore_torch_state
from sbkit.config.hparams import read_knobs
from sbkit.data.batches.batch import Batch, TextBatch
from sbkit.data.batches.plan import Example
from sbkit.data.batches.sampler import to_percents
from sbkit.distributed.device import Placement, resolve
from sbkit.train.nonfinite import FOLDER, KEPT
from sbkit.train.recipe import load_recipe
from sbkit.train.step import training_loss

REPRODUCED = 1  # exit code
MOST_EXAMPLES = 4096  # of a micro-batch
MOST_ROWS = 2 * MOST_EXAMPLES  # some are joined
LARGEST_RECORD, LARGEST_KEPT = 1 << 24, 1 << 36  # bytes
MUST = f"be one of the .json files of a run's {FOLDER}/ folder, with its .pt beside it"
FIX = f"Name such a file; the newest {KEPT} of each rank can be replayed."


@dataclass
class Trace:
    """What was first not finite on the way forward, on the way back, and among the losses."""

    forward: str | None = None
    backward: str | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Return whether nothing was wrong."""
        return self.forward is None and self.backward is None and all(map(_is_finite, self.losses))


def replay_file(file: Path) -> int:
    """Print which utterance and which module were first not finite; return 1 if any was.

    Raises SbkitError for a file that training did not write, or one without what a replay needs.
    """
    record, epoch, modules, micro_batches = _read(file)
    run_folder = file.resolve().parent.parent
    yaml_file = run_folder / RESOLVED
    knobs = read_knobs(yaml_file, {})
    recipe = load_recipe(knobs, yaml_file) if "recipe" in knobs else None
    here = {"output_folder": str(run_folder)}
    with PlannedRun(yaml_file, here, recipe=recipe) as planned:
        with suppress(MissingPartError):  # a fault of theirs is reported with the batch
            _ = planned.loaders  # while the model is on the CPU, where its stride is measured
        brain = _brain(planned)
        refuse_other_model(modules, brain.modules.state_dict(), of=str(file.with_suffix(".pt")))
        brain.modules.load_state_dict(modules)
        with reading(file, must=MUST, fix=FIX):
            brain.on_stage_start(Stage.TRAIN, epoch)
            found = [_tell(brain, _again(planned, each), each["random"]) for each in micro_batches]
    if any(found):
        return REPRODUCED
    print(
        f"Everything was finite here, on {brain.device} in {brain.precision}; it was not in "
        f"training ({record})."
    )
    return 0


def _again(planned: PlannedRun, micro_batch: Mapping[str, Any]) -> Batch:
    """Make a micro-batch again, of the run's own data; raises SbkitError where they are others."""
    try:
        loader = planned.loaders.train
    except MissingPartError as error:
        raise next(iter(planned.faults.values())) from error
    try:
        examples = [Example(tuple(rows), *rest) for rows, *rest in micro_batch["plan"]]
        _refuse_plan(examples, to_percents(planned.knobs.get("speeds", [1.0])))
        batch: Batch = loader.collate_fn(loader.dataset.__getitems__(examples))
    except Exception as error:  # whatever other rows end in
        raise _other_data(micro_batch["ids"], f"{type(error).__name__}: {error}") from error
    if batch.ids != micro_batch["ids"]:
        raise _other_data(micro_batch["ids"], f"its rows are {', '.join(batch.ids[:3])} now")
    return batch


def _refuse_plan(examples: Sequence[Example], percents: Sequence[int]) -> None:
    """Refuse what no training plans; raises ValueError, as the data do where they are others."""
    numbers = [
        number
        for each in examples
        for number in (*each.rows, each.samples, each.percent, each.weight)
    ]
    if not all(type(each) is int for each in numbers):
        raise ValueError("its plan is not of whole numbers")
    if sum(len(each.rows) for each in examples) > MOST_ROWS:
        raise ValueError(f"it has more than {MOST_ROWS} rows")
    if not {each.percent for each in examples} <= {*percents}:
        raise ValueError("its speeds are not those of the run")


def _other_data(ids: Sequence[str], why: str) -> SbkitError:
    return SbkitError(
        f"A replay must find the data that the run was trained on, but the batch of "
        f"{', '.join(map(str, ids[:3]))} cannot be made again ({why}). Put the corpus back."
    )


def _tell(brain: Any, batch: Batch, random: TorchState) -> bool:
    """Run a batch whole and each of its utterances alone, and say what is not finite."""
    whole = trace(brain, batch, random)
    if whole.is_finite:
        return False
    print(f"The batch of {len(batch)} utterances: {_words(whole)}")
    losses = whole.losses if len(whole.losses) == len(batch) else [0.0] * len(batch)  # or a mean
    for row, (name, loss) in enumerate(zip(batch.ids, losses, strict=True)):
        one = trace(brain, batch.take(slice(row, row + 1)), random)
        if not (_is_finite(loss) and one.is_finite):
            print(f"  {printable(name)} ({one_line(batch, row)}): alone, {_words(one)}")
    return True


def one_line(batch: Batch, row: int) -> str:
    """Return an utterance's lengths and text."""
    samples = f"{int(batch.audio_lengths[row])} samples"
    if isinstance(batch, TextBatch):
        return f"{samples}, {int(batch.token_lengths[row])} labels, {batch.texts[row]!r}"
    return samples


def trace(brain: Any, batch: Batch, random: TorchState) -> Trace:
    """Run the step's forward and backward once, and watch every module."""
    found = Trace()
    restore_torch_state(random, brain.device)
    brain.train_mode()
    brain.modules.zero_grad(set_to_none=True)
    batch = batch.to(brain.device)
    with _watched(brain.modules, found):
        loss = training_loss(brain, batch)
        found.losses = loss.sums.tolist()
        torch.autograd.backward(loss.sums.sum())
    for name, parameter in brain.modules.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            found.backward = found.backward or f"the gradient of {name}"
    return found


@contextmanager
def _watched(modules: nn.Module, found: Trace) -> Iterator[None]:
    """Note the first module whose output, and the first whose gradient, is not finite."""

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if found.forward is None and not _all_finite(output):
            found.forward = f"the output of {name}"
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hooked: Any = tensor
                hooked.register_hook(partial(look_back, name))

    def look_back(name: str, gradient: Tensor) -> None:
        if found.backward is None and not _all_finite(gradient):
            found.backward = f"the gradient that comes back to the output of {name}"

    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield


def _all_finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(value))


def _is_finite(loss: float) -> bool:
    return abs(loss) < float("inf")


def _words(found: Trace) -> str:
    """Write where it began."""
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
    with reading(planned.yaml_file, must="have all that its recipe needs", fix="Put it back."):
        try:
            return planned.make_brain(placement_here(planned))
        except MissingPartError as error:
            raise next(
                iter(planned.faults.values()),
                SbkitError(
                    "A replay needs the recipe that made the run, but its hyperparams.yaml names "
                    "none. Replay files of runs of train.py."
                ),
            ) from error


def placement_here(planned: PlannedRun) -> Placement:
    """Return the run's device where there is one, else the CPU, in a precision that it has."""
    with suppress(MissingPartError):
        there: Placement = planned.placement
        return there
    precision = planned.knobs.get("precision", "fp32")
    return resolve("cpu", "bf16" if precision == "fp16" else precision)


def _read(file: Path) -> tuple[str, int, dict[str, Tensor], list[dict[str, Any]]]:
    """Return what was not finite, the epoch, the model, and the plans of the step's micro-batches.

    Each is a mapping of `ids`, `plan` and `random`. Raises SbkitError.
    """
    kept = read_regular(file, largest=LARGEST_RECORD, what="What is replayed")
    with reading(file, must=MUST, fix=FIX):
        record = json.loads(kept)
        if not isinstance(record, dict):
            raise ValueError("it holds no record")
        tensors = read_regular(
            file.with_suffix(".pt"), largest=LARGEST_KEPT, what="What is replayed, its .pt,"
        )
        saved = torch.load(BytesIO(tensors), "cpu", weights_only=True)
        micro_batches = [
            {name: each[name] for name in ("ids", "plan", "random")}
            for each in saved["micro_batches"]
        ]
        for each in micro_batches:
            check_torch_state(each["random"])
            if len(each["plan"]) > MOST_EXAMPLES:
                raise ValueError(f"a batch has more than {MOST_EXAMPLES} examples")
        if not micro_batches:
            raise ValueError("it holds no micro-batch")
        what, step = printable(str(record["what"])), int(record["step"])
        epoch = int(record.get("epoch", 1))  # an earlier sbkit wrote none
        return f"its {what}, step {step}", epoch, {**saved["modules"]}, micro_batches

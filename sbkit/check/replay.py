"""`sbkit replay`: run a batch that was not finite once more, alone, and name where it began.

Legend: B utterances.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.text import printable
from sbkit.check.model.dry_run import tensors_in
from sbkit.checkpoint.comparison import check_same_model
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.checkpoint.integrity import reading
from sbkit.checkpoint.rng import TorchState, restore_torch_state
from sbkit.data.batches.batch import Batch
from sbkit.data.batches.plan import Example
from sbkit.distributed.device import resolve
from sbkit.logs.log import quiet
from sbkit.train.nonfinite import FOLDER, KEPT
from sbkit.train.run import Run
from sbkit.train.step import training_loss

REPRODUCED = 1  # exit code
MUST = f"be one of the .json files of a run's {FOLDER}/ folder, with its .pt beside it"
FIX = f"Name such a file; the newest {KEPT} of each rank can be replayed."


@dataclass
class Trace:
    """What was first not finite in the forward pass, in the backward pass, and among the losses."""

    forward: str | None = None
    backward: str | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Return whether everything was finite."""
        return self.forward is None and self.backward is None and all(map(_is_finite, self.losses))

    def __str__(self) -> str:
        if self.is_finite:
            return "everything is finite"
        bad = sum(not _is_finite(loss) for loss in self.losses)
        losses = f"the loss of {bad} of {len(self.losses)}" if bad else None
        places = (self.forward, losses, self.backward)
        return "not finite: " + ", then ".join(place for place in places if place)


def replay_file(file: Path) -> int:
    """Print which utterance and which module were first not finite; return 1 if any was.

    Raises SbkitError: training did not write the file, or the run cannot be built again.
    """
    with reading(file, must=MUST, fix=FIX):
        record = json.loads(file.read_bytes())
        saved = torch.load(file.with_suffix(".pt"), "cpu", weights_only=True)
        what, step, epoch = record["what"], record["step"], record["epoch"]
        modules, micro_batches = saved["modules"], list(saved["micro_batches"])
    folder = file.resolve().parent.parent
    run = Run(folder / RESOLVED, {"output_folder": str(folder)})
    with quiet():
        loader = run.loaders.train
    brain = _make_brain(run)
    check_same_model(modules, brain.modules.state_dict(), of=str(file.with_suffix(".pt")))
    brain.modules.load_state_dict(modules)
    brain.on_stage_start(Stage.TRAIN, epoch)
    found = [_describe(brain, _again(loader, each), each["random"]) for each in micro_batches]
    if any(found):
        return REPRODUCED
    print(
        f"Everything was finite here, on {brain.device} in {brain.precision}; it was not in "
        f"training (its {printable(str(what))}, step {step})."
    )
    return 0


def _make_brain(run: Run) -> Any:
    """Make the Brain on the run's device where there is one, else on the CPU."""
    try:
        placement = run.placement
    except SbkitError:
        precision = run.knobs.get("precision", "fp32")
        placement = resolve("cpu", "bf16" if precision == "fp16" else precision)
    return run.make_brain(device=placement.device, precision=placement.precision)


def _again(loader: Any, micro_batch: Mapping[str, Any]) -> Batch:
    """Make a micro-batch again, of the run's own data; raises SbkitError where they are others."""
    ids = micro_batch["ids"]
    try:
        examples = [Example(tuple(rows), *rest) for rows, *rest in micro_batch["plan"]]
        batch: Batch = loader.collate_fn(loader.dataset.__getitems__(examples))
        if batch.ids != ids:
            raise ValueError(f"its rows are {', '.join(batch.ids[:3])} now")
    except Exception as error:  # whatever other rows end in
        raise SbkitError(
            "A replay must find the data that the run was trained on, but the batch of "
            f"{', '.join(map(str, ids[:3]))} cannot be made again ({type(error).__name__}: "
            f"{error}). Put the corpus back."
        ) from error
    return batch


def _describe(brain: Any, batch: Batch, random: TorchState) -> bool:
    """Run a batch whole and each of its utterances alone, and print what is not finite."""
    whole = trace(brain, batch, random)
    if whole.is_finite:
        return False
    print(f"The batch of {len(batch)} utterances: {whole}")
    losses = whole.losses if len(whole.losses) == len(batch) else [0.0] * len(batch)  # or a mean
    for row, (name, loss) in enumerate(zip(batch.ids, losses, strict=True)):
        one = trace(brain, batch.take(slice(row, row + 1)), random)
        if not (_is_finite(loss) and one.is_finite):
            samples = int(batch.audio_lengths[row])
            print(f"  {printable(name)} ({samples} samples): alone, {one}")
    return True


def trace(brain: Any, batch: Batch, random: TorchState) -> Trace:
    """Run the step's forward and backward once, and watch every module."""
    found = Trace()
    restore_torch_state(random, brain.device)
    brain.train_mode()
    brain.modules.zero_grad(set_to_none=True)
    with _watched(brain.modules, found):
        loss = training_loss(brain, batch.to(brain.device))
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
        for tensor in tensors_in(output):
            if not tensor.isfinite().all():
                found.forward = found.forward or f"the output of {name}"
            if tensor.requires_grad:
                hooked: Any = tensor
                hooked.register_hook(partial(look_back, name))

    def look_back(name: str, gradient: Tensor) -> None:
        if not gradient.isfinite().all():
            found.backward = (
                found.backward or f"the gradient that comes back to the output of {name}"
            )

    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield


def _is_finite(loss: float) -> bool:
    return abs(loss) < float("inf")

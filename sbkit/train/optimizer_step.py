"""One step of the optimizer: the gradients of its micro-batches, clipped, taken or skipped.

The host does not wait for the device: whether a step was skipped is read once in a while.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sbkit.models.loss import Loss
from sbkit.train.buffers import RunningStatistics
from sbkit.train.gradients import clip, normalize_by_tokens, step_unless
from sbkit.train.nonfinite import NonFiniteRecorder


class OptimizerStep:
    """The step at hand."""

    def __init__(self, modules: nn.Module, device: torch.device, folder: Path | None) -> None:
        self._buffers = RunningStatistics(modules)
        self.nonfinite = NonFiniteRecorder(folder, modules)
        # On this rank: the labels of the step, and its losses that were not finite.
        self._counts = torch.zeros(2, device=device)
        self._lost = torch.zeros((), device=device)  # such losses over all ranks

    def begin_epoch(self) -> None:
        """Forget the counts of a step that an epoch left open."""
        self._counts.zero_()

    def begin(self) -> None:
        """Save what a skipped step must not change, before its first micro-batch."""
        self._buffers.save()

    def begin_again(self) -> None:
        """Undo what its micro-batches left, but for their gradients."""
        self._buffers.restore(torch.ones_like(self._lost, dtype=torch.bool))
        self._counts.zero_()
        self.nonfinite.forget()

    def backward(self, loss: Loss, scaler: GradScaler) -> Tensor:
        """Add the gradient of a micro-batch, or of a piece of one; return its summed loss: ()."""
        total = loss.sums.sum()
        torch.autograd.backward(scaler.scale(total))
        self._counts += torch.stack([loss.counts.sum(), ~total.isfinite()])
        return total

    def normalize(self, optimizers: Sequence[Optimizer]) -> None:
        """Turn the gradient of the sum into that of the mean over all labels of all ranks."""
        self._lost = normalize_by_tokens(optimizers, self._counts)
        self._counts.zero_()

    def take(
        self,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler,
        *,
        max_grad_norm: float,
        number: int,
    ) -> None:
        """Unscale, clip by one norm, step unless the norm is not finite, update."""
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        skipped: Tensor = ~clip(optimizers, max_grad_norm).isfinite()
        for optimizer in optimizers:
            step_unless(skipped, optimizer, scaler)
        self._buffers.restore(skipped)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.nonfinite.end_step(number, torch.stack([self._lost, skipped]))

    def read(self, bad_before: int, patience: int, scaler: GradScaler) -> tuple[int, int]:
        """Count the steps that were skipped since the last reading, and the bad ones among them.

        Raises SbkitError: with the ``bad_before`` of the epoch more than ``patience`` were bad.
        """
        skipped, bad = self.nonfinite.flush(overflow_is_usual=scaler.is_enabled())
        self.nonfinite.refuse_more(bad_before + bad, patience)
        return skipped, bad

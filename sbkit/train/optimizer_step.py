"""One step of the optimizer: the gradients of its micro-batches, clipped, taken or skipped.

The host does not wait for the device: whether a step was skipped is read once in a while.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.distributed.ranks import sum_over_ranks, world_size
from sbkit.models.loss import Loss
from sbkit.train.buffers import RunningStatistics
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
        """Unscale, clip each by its norm, step unless one of the norms is not finite, update."""
        # Those that have anything to step by: a GradScaler refuses the others, and torch has the
        # norm of no gradient on the CPU, whatever the device.
        stepping = [each for each in optimizers if any(True for _ in with_gradient([each]))]
        for optimizer in stepping:
            scaler.unscale_(optimizer)
        norms = [clip(each, max_grad_norm) for each in stepping]
        skipped = ~torch.stack([torch.zeros_like(self._lost), *norms]).isfinite().all()
        for optimizer in stepping:
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


def normalize_by_tokens(optimizers: Iterable[Optimizer], counts: Tensor) -> Tensor:
    """Turn the summed loss's gradient into that of the mean over all labels of the step.

    DDP has averaged over the ranks what is to be summed, hence the world size. Where any rank's
    loss was not finite every rank's gradient becomes NaN, so that they skip the step together.

    counts (2,): labels that this rank saw in the step, and losses that were not finite; both are
    added up over the ranks here. Returns the number of such losses: (). Raises SbkitError for a
    sparse gradient.
    """
    labels, bad = sum_over_ranks(counts.to(torch.float32, copy=True)).unbind()
    factor = torch.where(bad > 0, torch.nan, world_size() / labels.clamp(min=1))
    grads = [each.grad for each in with_gradient(optimizers) if each.grad is not None]
    if any(each.is_sparse for each in grads):
        raise SbkitError(
            "Gradients must be dense, to be divided and clipped, but those of an embedding are "
            "sparse. Take `sparse=True` out of it."
        )
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return bad


def clip(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the groups of an optimizer by one norm over all of them; return the norm before: ().

    Each optimizer by its own, as SpeechBrain does: the one of a pretrained encoder, say, is not
    held back by the gradients of a new head.

    A ``max_norm`` that is not positive clips nothing; PyTorch would reverse the gradient.
    """
    limit = max_norm if max_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(with_gradient([optimizer])), limit)


def step_unless(skipped: Tensor, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Step, unless the gradient is not finite; then parameters and optimizer stay as they are.

    skipped (): on the device. A fused optimizer reads it there, by the protocol that GradScaler has
    with it; for another one the host has to wait for it, which costs nothing on the CPU.
    """
    if scaler.is_enabled():
        for found in scaler._found_inf_per_device(optimizer).values():
            found.copy_(skipped)  # by itself it looks at the gradients of this optimizer alone
        scaler.step(optimizer)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        device: Any = optimizer
        device.grad_scale, device.found_inf = None, skipped.to(torch.float32)
        scaler.step(optimizer)
        del device.grad_scale, device.found_inf
    elif not bool(skipped):
        scaler.step(optimizer)


def with_gradient(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Yield the parameters that have a gradient, over all optimizers and groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (each for each in group["params"] if each.grad is not None)

"""From the gradient of a sum to a step of the optimizer, without asking the device anything."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sbkit.distributed.ranks import sum_over_ranks, world_size


def normalize_by_tokens(optimizers: Iterable[Optimizer], counts: Tensor) -> Tensor:
    """Turn the summed loss's gradient into that of the mean over all labels of the step.

    DDP has averaged over the ranks what is to be summed, hence the world size. Where any rank's
    loss was not finite every rank's gradient becomes NaN, so that they skip the step together.

    counts (2,): labels that this rank saw in the step, and losses that were not finite; both are
    added up over the ranks here. Returns the number of such losses: ().
    """
    labels, bad = sum_over_ranks(counts.to(torch.float32, copy=True)).unbind()
    factor = torch.where(bad > 0, torch.nan, world_size() / labels.clamp(min=1))
    grads = [each.grad for each in with_gradient(optimizers) if each.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0]))
    return bad


def clip(optimizers: Iterable[Optimizer], max_norm: float) -> Tensor:
    """Clip every parameter group by one norm over all of them; return the norm before: ().

    A ``max_norm`` that is not positive clips nothing; PyTorch would turn the gradient round.
    """
    limit = max_norm if max_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(with_gradient(optimizers)), limit)


def step_unless(skipped: Tensor, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Step, unless the gradient is not finite; then parameters and optimizer stay as they are.

    skipped (): on the device. A fused optimizer reads it there, by the protocol that GradScaler has
    with it; for another one the host has to wait for it, which costs nothing on the CPU.
    """
    if scaler.is_enabled():
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

"""From the gradient of a sum to a step of the optimizer, without asking the device anything."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.tensors.distributed import sum_over_ranks, world_size


def divide_once(optimizers: Iterable[Optimizer], labels: Tensor) -> None:
    """Turn the summed loss's gradient into that of the mean over all labels of the step.

    DDP has averaged over the ranks what is to be summed, hence the world size.
    labels (): labels that this rank saw in the step; they are added up over the ranks here.
    """
    total = sum_over_ranks(labels.to(torch.float32)).clamp(min=1)
    grads = [each.grad for each in with_gradient(optimizers) if each.grad is not None]
    if grads:
        torch._foreach_mul_(grads, (world_size() / total).to(grads[0]))


def clip(optimizers: Iterable[Optimizer], max_norm: float) -> Tensor:
    """Clip every parameter group by one norm over all of them; give the norm before: ()."""
    return nn.utils.clip_grad_norm_(list(with_gradient(optimizers)), max_norm)


def with_gradient(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Walk the parameters that have a gradient, over all optimizers and groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (each for each in group["params"] if each.grad is not None)

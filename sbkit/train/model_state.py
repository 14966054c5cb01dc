"""State of a model beside its weights: their moving average, running and feature statistics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch import Tensor, nn

from sbkit.base.torch_internals import batch_norms
from sbkit.data.batch import Batch
from sbkit.distributed.device import widest_float
from sbkit.distributed.ranks import from_main_rank, sum_over_ranks, world_size
from sbkit.models.layers import GlobalNorm

ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@register_checkpoint_hooks
class MovingAverage:
    """An exponential moving average of the parameters that learn, which can replace them.

    A run is validated, tested and exported with the averages. A parameter joins with the first
    step in which it learns. With a ``decay`` of 0 nothing is averaged. In a checkpoint, the file of
    the model holds the averages, and the file of this class holds the weights.
    Source: Polyak and Juditsky 1992; the decay is lower in the first steps, as in TensorFlow's
    `ExponentialMovingAverage`, so that the initial weights are soon forgotten.

    Attributes:
        decay: the share of the average that each step keeps.
        others: the average of each parameter by its index; its weights while averages are applied.
    """

    def __init__(self, modules: nn.Module, decay: float) -> None:
        self._modules, self.decay = modules, decay
        self.others: dict[int, Tensor] = {}
        self._is_applied = False

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Add the weights after a step (from 1), unless it was ``skipped`` (), on the device."""
        if not self.decay:
            return
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        weight = torch.where(skipped, 0.0, share)
        for index, parameter in enumerate(self._modules.parameters()):
            if index in self.others:
                self.others[index].lerp_(parameter, weight.to(parameter.dtype))
            elif parameter.requires_grad:
                self.others[index] = parameter.clone()

    @torch.no_grad()
    def apply(self, to: bool = True) -> None:
        """Put the averages into the modules, or the weights back if ``to`` is false."""
        if to is self._is_applied:
            return
        for index, parameter in enumerate(self._modules.parameters()):
            if index in self.others:
                other, self.others[index] = self.others[index], parameter.clone()
                parameter.copy_(other)
        self._is_applied = to

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the averages within a `with` statement."""
        was_applied = self._is_applied
        self.apply()
        yield
        self.apply(was_applied)

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: Path) -> None:
        torch.save({"others": self.others, "is_applied": self._is_applied}, path)

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _load(self, path: Path, end_of_epoch: bool) -> None:
        device = next(self._modules.parameters()).device
        saved = torch.load(path, device, weights_only=True)
        self.others, self._is_applied = saved["others"], saved["is_applied"]


class RunningStatistics:
    """Restore the tensors that a skipped step wrote to, such as batch normalization's.

    Otherwise a batch that is not finite would stay in them for ever. All are copied before each
    step, because the host does not wait to learn whether it was skipped.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy the tensors, before the first micro-batch of a step."""
        self._before = [
            (module, name, value.clone())
            for module in self._modules.modules()
            for name, value in [
                *module.named_buffers(recurse=False, remove_duplicate=False),
                *vars(module).items(),
            ]
            if isinstance(value, Tensor)
        ]

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo the changes of the step if ``skipped`` () is true."""
        for module, name, before in self._before:
            now = getattr(module, name, None)  # a module may have another tensor by now
            if isinstance(now, Tensor) and now.shape == before.shape:
                now.copy_(torch.where(skipped, before.to(now.dtype), now))


@torch.no_grad()
def agree_on_buffers(modules: nn.Module) -> None:
    """Make the buffers equal on all ranks, before an evaluation or a checkpoint.

    The statistics of batch normalizations are averaged. All other buffers, such as a running mean
    of a user's module, are taken from rank 0, which writes the checkpoints.
    """
    if world_size() == 1:
        return
    statistics: list[Tensor | None] = [
        tensor for norm in batch_norms(modules) for tensor in (norm.running_mean, norm.running_var)
    ]
    averaged = {id(tensor): tensor for tensor in statistics if tensor is not None}
    for statistic in averaged.values():
        sum_over_ranks(statistic).div_(world_size())
    for buffer in modules.buffers():
        if id(buffer) not in averaged and buffer.numel():
            from_main_rank(buffer)


@torch.no_grad()
def measure_features(
    model: nn.Module,
    compute: ComputeFeatures,
    batches: Iterable[Batch],
    device: torch.device,
) -> None:
    """Set the mean and deviation of every GlobalNorm that has none yet, in one exact pass.

    Each rank reads its share of the batches. The sums are in float64, so that the order of a
    million utterances does not matter. A model that was measured before stays as it is.

    Args:
        model: the modules.
        compute: from audio (B, S) and lengths (B,) to features (B, T, M), zero past their lengths.
        batches: the batches of the training set.
        device: the device of the model.
    """
    norms = [part for part in model.modules() if isinstance(part, GlobalNorm)]
    fresh = [norm for norm in norms if int(norm.frames) == 0]
    if not fresh:
        return
    frames = torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.zeros(2, len(fresh[0].mean), dtype=widest_float(device), device=device)
    for host_batch in batches:
        batch = host_batch.to(device)
        features, lengths = compute(batch.audio.float(), batch.audio_lengths)
        rows = features.to(sums.dtype).flatten(0, 1)  # (B*T, M)
        sums += torch.stack([rows.sum(0), rows.square().sum(0)])
        frames += lengths.sum()
    sum_over_ranks(sums)
    sum_over_ranks(frames)
    for norm in fresh:
        norm.set_statistics(sums, frames)

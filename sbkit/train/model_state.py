"""A model's state besides its weights: their moving average, and statistics of normalizations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch import Tensor, nn

from sbkit.audio.lengths import sum_dtype
from sbkit.base.errors import ConfigError
from sbkit.base.torch_internals import batch_norms
from sbkit.checkpoint.rng import preserve_rng
from sbkit.data.batch import Batch
from sbkit.distributed.ranks import copy_from_rank0, sum_over_ranks, world_size
from sbkit.models.layers import GlobalNorm

ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@register_checkpoint_hooks
class MovingAverage:
    """An exponential moving average of the learning parameters, which can be swapped with them.

    A run is validated, tested and exported with the averages. The average of a parameter starts
    with the first step in which the parameter learns. In a checkpoint, the file of the model holds
    the averages, and the file of this class holds the weights.
    Source: Polyak and Juditsky 1992; the decay is lower in the first steps, as in TensorFlow's
    `ExponentialMovingAverage`, so that the initial weights are soon forgotten.

    Attributes:
        decay: the weight of the old average in each step; with 0 nothing is averaged.
        shadow: averages by the index of their parameter. While the averages are swapped into the
            modules, it holds the weights instead.
        optimizers: those that average the weights in its place, as `schedulefree` does. After their
            `eval` the modules have the averages, and after their `train` the weights up to
            rounding, which `shadow` makes exact.
    """

    def __init__(self, modules: nn.Module, decay: float) -> None:
        self._modules = modules
        self.decay = decay
        self.shadow: dict[int, Tensor] = {}
        self.optimizers: list[Any] = []
        self._swapped = False

    def restart(self) -> None:
        """Forget the averages, and the weights that an optimizer averages."""
        self.swap_out()
        self.shadow = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def delegate(self, optimizers: Iterable[Any]) -> bool:
        """Let those of the optimizers average the weights that can; return whether any does."""
        self.optimizers = [o for o in optimizers if hasattr(o, "train") and hasattr(o, "eval")]
        if self.optimizers and self.decay:
            name = type(self.optimizers[0]).__name__
            raise ConfigError(
                f"`ema_decay` must be 0, because {name} averages the weights itself.",
                keys=("ema_decay",),
            )
        return bool(self.optimizers)

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Update the averages after step ``step``, counted from 1.

        ``skipped`` () is on the device. If it is true, the averages do not change.
        """
        if not self.decay:
            return
        new_weight = 1 - min(self.decay, (1 + step) / (10 + step))
        weight = torch.where(skipped, 0.0, new_weight)
        for index, parameter in enumerate(self._modules.parameters()):
            if index in self.shadow:
                self.shadow[index].lerp_(parameter, weight.to(parameter.dtype))
            elif parameter.requires_grad:
                self.shadow[index] = parameter.clone()

    def swap_in(self) -> None:
        if not self._swapped:
            self._swap()

    def swap_out(self) -> None:
        for optimizer in self.optimizers:
            optimizer.train()
        if self._swapped:
            self._swap()
        if self.optimizers:
            self.shadow = {}

    @torch.no_grad()
    def _swap(self) -> None:
        if self.optimizers and not self._swapped:
            self.shadow = {i: p.clone() for i, p in enumerate(self._modules.parameters())}
            for optimizer in self.optimizers:
                optimizer.eval()
        else:
            for index, parameter in enumerate(self._modules.parameters()):
                if index in self.shadow:
                    before = parameter.clone()
                    parameter.copy_(self.shadow[index])
                    self.shadow[index] = before
        self._swapped = not self._swapped

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        was_swapped = self._swapped
        self.swap_in()
        try:
            yield
        finally:
            if not was_swapped:
                self.swap_out()

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: Path) -> None:
        torch.save({"others": self.shadow, "is_applied": self._swapped}, path)

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _load(self, path: Path, end_of_epoch: bool) -> None:
        device = next(self._modules.parameters()).device
        saved = torch.load(path, device, weights_only=True)
        self.shadow = saved["others"]
        self._swapped = saved["is_applied"]


class BufferSnapshot:
    """Restore buffers and other tensors that a skipped step has changed, such as running means.

    Without this, a batch that is not finite would stay in the statistics of a batch normalization
    for ever. All tensor attributes of the modules are copied before each step, because the host
    does not wait to learn whether the step was skipped. Tensors on another device than the step are
    left out: SpeechBrain's STFT, for example, keeps its window on the CPU.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @torch.no_grad()
    def save(self) -> None:
        self._before = []
        for module in self._modules.modules():
            buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
            for name, value in (buffers | vars(module)).items():
                if isinstance(value, Tensor):
                    self._before.append((module, name, value.clone()))

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo the changes of the step if ``skipped`` () is true."""
        for module, name, before in self._before:
            now = getattr(module, name, None)
            if not isinstance(now, Tensor) or now.shape != before.shape:
                continue  # the module replaced it with something else
            if before.device == now.device == skipped.device:
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
            copy_from_rank0(buffer)


@torch.no_grad()
def measure_normalization(
    norms: Sequence[GlobalNorm],
    compute: ComputeFeatures,
    batches: Iterable[Batch],
    device: torch.device,
) -> None:
    """Set the mean and deviation of GlobalNorms, in one exact pass.

    Each rank reads its own batches. The sums are in float64, so that the order of a million
    utterances does not matter.

    norms: at least one.
    compute: from audio (B, S) and lengths (B,) to features (B, T, M), zero past their lengths.
    """
    frames = torch.zeros((), dtype=torch.int64, device=device)
    # Of features, and of their squares
    sums = torch.zeros(2, len(norms[0].mean), dtype=sum_dtype(device), device=device)
    with preserve_rng(device):  # a loader draws a number
        for host_batch in batches:
            batch = host_batch.to(device)
            features, lengths = compute(batch.audio.float(), batch.audio_lengths)
            features = features.to(sums.dtype) * batch.weights[:, None, None]
            rows = features.flatten(0, 1)  # (B*T, M)
            sums += torch.stack([rows.sum(0), rows.square().sum(0)])
            frames += (lengths.to(device) * batch.weights).sum()
    sum_over_ranks(sums)
    sum_over_ranks(frames)
    for norm in norms:
        norm.set_statistics(sums, frames)

"""LoRA adapters: low-rank updates of the frozen Linear layers of a pretrained encoder.

Legend: R rank of the update, I inputs and O outputs of a layer.
Source: Hu et al. 2021.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.functional import linear

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import PositiveCount, require_in_range

SCALE_SUFFIX = ".lora_scale"  # in a state_dict, marks a layer that has an adapter


class LoraLinear(nn.Linear):
    """Add a trainable update, which starts at zero, to a Linear layer: (..., I) -> (..., O).

    ``lora_scale``, alpha / R, is a buffer, so that a state_dict has all that is merged.
    """

    lora_scale: Tensor

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))  # (R, I)
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))  # (O, R)
        self.register_buffer("lora_scale", layer.weight.new_tensor(alpha / rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        update = linear(linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.lora_scale * update


def add_adapters(
    module: nn.Module, *, rank: int, projections: Sequence[str], alpha: float | None = None
) -> None:
    """Freeze a module, and add adapters to some of its Linear layers, in place.

    projections: names of layers, each the last component of a path such as `layers.0.q_proj`.
    """
    require_in_range("rank", rank, PositiveCount)
    module.requires_grad_(False)
    layers = {path: m for path, m in module.named_modules() if isinstance(m, nn.Linear)}
    names = {path.rpartition(".")[2] for path in layers}
    if not projections or not names.issuperset(projections):
        raise ConfigError(
            f"`projections` of `lora` is {projections!r}, but the Linear layers of the encoder are "
            f"{', '.join(sorted(names))}."
        )
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        if name in projections:
            adapted = LoraLinear(layer, rank=rank, alpha=rank if alpha is None else alpha)
            setattr(module.get_submodule(parent), name, adapted)


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict whose weights include the updates of its adapters."""
    merged = dict(weights)
    for name in weights:
        if name.endswith(SCALE_SUFFIX):
            layer = name.removesuffix(SCALE_SUFFIX)
            scale, a, b = (merged.pop(f"{layer}.lora_{key}") for key in ("scale", "a", "b"))
            weight = merged[f"{layer}.weight"]
            updated = weight + scale.double() * (b.double() @ a.double())
            merged[f"{layer}.weight"] = updated.to(weight)
    return merged

"""LoRA: projections of a pretrained encoder learn a change of low rank beside their frozen weights.

Legend: R rank of the change, I inputs, O outputs of a projection.

Source: Hu et al. 2021.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import AT_LEAST_ONE, require_in_range

SCALE = ".lora_scale"  # how the name of an adapter's constant ends, beside its two matrices


class LoraLinear(nn.Linear):
    """A Linear layer and its change, at first none: (..., I) -> (..., O).

    lora_scale (): alpha / R, so that a state_dict alone says what the change is.
    """

    lora_scale: Tensor

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))  # (R, I)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))  # (O, R)
        self.register_buffer("lora_scale", torch.tensor(alpha / rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Project."""
        change = linear(linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.lora_scale * change


def add_adapters(
    module: nn.Module, *, rank: int, projections: Sequence[str], alpha: float | None = None
) -> None:
    """Freeze a module, and give those of its Linear layers that have one of the names an adapter.

    The name is the last of a layer's path; ``alpha``, of the change, is ``rank`` if not given.
    Raises SbkitError for a name that no layer has.
    """
    require_in_range({"rank": rank}, {"rank": AT_LEAST_ONE})
    module.requires_grad_(False)
    layers = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    names = {name.rpartition(".")[2] for name in layers}
    if not projections or not names.issuperset(projections):
        raise SbkitError(
            "`projections` of `lora` must be names of Linear layers of the encoder, "
            f"{', '.join(sorted(names))}, but is {projections!r}. Correct it."
        )
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        if name in projections:
            adapted = LoraLinear(layer, rank=rank, alpha=rank if alpha is None else alpha)
            setattr(module.get_submodule(parent), name, adapted)


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict without adapters, whose projections have the changes in their weights."""
    merged = dict(weights)
    for name in weights:
        if name.endswith(SCALE):
            stem = name.removesuffix(SCALE)
            scale, a, b = (merged.pop(f"{stem}.lora_{each}") for each in ("scale", "a", "b"))
            weight = merged[f"{stem}.weight"]
            merged[f"{stem}.weight"] = (weight + scale.double() * (b.double() @ a.double())).to(
                weight
            )
    return merged

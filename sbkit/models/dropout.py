"""Dropout that costs little on the CPU."""

import numpy as np
import torch
from torch import Tensor, nn

_SEEDS = 2**63 - 1
_STEPS = 1 << 16  # a decision is one of 65536 values, so a rate is met to 1 part in 65536


class Dropout(nn.Module):
    """Set a share of the elements to zero and scale up the rest; do nothing when not training.

    PyTorch's own draws one Mersenne-Twister number an element, one after the other: on two cores
    it took 23 % of a Conformer's training step. Here a number of NumPy's SFC64, which is seeded by
    PyTorch's generator, makes four decisions. Elsewhere than on the CPU it is PyTorch's.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop: (...) -> (...)."""
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p)
        return x * self._factors(x)

    def add(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Return x + weight * dropout(y), in one pass over memory where that is possible."""
        if self.training and self.p > 0.0 and y.device.type == "cpu" and x.dtype == y.dtype:
            return torch.addcmul(x, y, self._factors(y, weight))
        return torch.add(x, self(y), alpha=weight)

    def _factors(self, x: Tensor, weight: float = 1.0) -> Tensor:
        """Draw for each element of x zero, or the weight over the share that is kept."""
        dropped = min(round(self.p * _STEPS), _STEPS - 1)
        draw = _draw_compiled if torch.compiler.is_compiling() else _draw
        drawn = draw(torch.randint(_SEEDS, ()), x.numel()).view(x.shape).to(torch.float32)
        factors = drawn.ge_(dropped - _STEPS // 2).mul_(weight * _STEPS / (_STEPS - dropped))
        return factors.to(x.dtype)


def _draw(seed: Tensor, count: int) -> Tensor:
    """Draw whole numbers from all that 16 bits hold: -> (count,) of int16."""
    words = np.random.SFC64(int(seed)).random_raw((count + 3) // 4)
    return torch.from_numpy(words.view(np.int16))[:count]


# For compiled code, one operation. Each call has a seed of its own, so that no compiler takes two
# calls of one size for the same.
_draw_compiled = torch.library.custom_op(
    "sbkit::draw_int16",
    lambda seed, count: _draw(seed, count).clone(),
    mutates_args=(),
    schema="(Tensor seed, SymInt count) -> Tensor",
)
_draw_compiled.register_fake(lambda seed, count: seed.new_empty(count, dtype=torch.int16))

"""An optimizer that gives each matrix an orthogonal step: more is learned from each batch."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sbkit.config.ranges import NOT_NEGATIVE, SHARE

# Three rounds of x -> a x + b x^3 + c x^5 bring singular values of 0.01 to 1 to between 0.73 and
# 1.27, each by the factors that are best for the values it meets (Amsel et al. 2025,
# arXiv:2505.16932). In `hparams/ctc.yaml` nine tenths of them are above 0.01. Five rounds of
# Jordan's one polynomial trained as well in 1.7 times the time; two rounds learned more slowly.
ROUNDS = (
    (8.0934, -23.6206, 17.4463),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)


class Step(NamedTuple):
    """A parameter, its gradient, and 1, or 0 where the step is skipped: ()."""

    parameter: Tensor
    grad: Tensor
    taken: Tensor


class Muon(Optimizer):
    """Step weights by their orthogonalized momentum, and vectors as AdamW does.

    A weight of more than two dimensions, such as a convolution's, is the matrix of its first
    dimension by the others. One whose matrix has a single row or column steps as a vector.

    params: parameters, or groups of them. lr: of both kinds. update_rms: root mean square of the
    step of a matrix, in units of lr; AdamW's is between 0.2 and 0.4. momentum: of matrices.
    betas, eps: AdamW's, of vectors. weight_decay: of both, decoupled, in units of lr.

    Sources: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982 (one lr for both kinds).
    """

    # A skipped step is told on the device, as to fused optimizers: the host does not wait for it.
    _step_supports_amp_scaling = True
    RANGES: ClassVar = {"update_rms": NOT_NEGATIVE, "momentum": SHARE}

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        update_rms: float = 0.4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "update_rms": update_rms,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient; return what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices: dict[torch.Size, list[Step]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                one = self._begin(parameter, parameter.grad)
                parameter.mul_(1 - one.taken * group["lr"] * group["weight_decay"])
                if is_matrix(parameter):
                    matrices[parameter.shape].append(one)
                else:
                    self._step_vector(one, group)
            for alike in matrices.values():
                self._step_matrices(alike, group)
        return loss

    def _begin(self, parameter: Tensor, grad: Tensor) -> Step:
        """Read, without waiting for the device, what GradScaler tells optimizers that allow it."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if scale is not None:
            grad = grad / scale
        if found_inf is None:
            return Step(parameter, grad, grad.new_ones(()))
        taken = (found_inf.to(grad.device) == 0).to(grad.dtype)
        return Step(parameter, grad.nan_to_num(0.0, 0.0, 0.0).mul_(taken), taken)

    def _step_matrices(self, steps: list[Step], group: dict[str, Any]) -> None:
        """Step weights of one shape together, in one product each for all of them."""
        momentum = group["momentum"]
        directions = []
        for parameter, grad, taken in steps:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(grad, taken * (1 - momentum))
            # Nesterov's: the average as it would be with this gradient once more.
            directions.append(grad.lerp(average, momentum).flatten(1))
        orthogonal = orthogonalize(torch.stack(directions))
        # The root mean square of an orthogonal matrix is 1 / sqrt of its longer side.
        size = group["lr"] * group["update_rms"] * max(orthogonal.shape[1:]) ** 0.5
        for (parameter, _, taken), matrix in zip(steps, orthogonal, strict=True):
            parameter.sub_(matrix.view_as(parameter) * (taken * size))

    def _step_vector(self, step: Step, group: dict[str, Any]) -> None:
        (parameter, grad, taken), (beta1, beta2) = step, group["betas"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros_like(taken)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += taken
        steps = state["step"].clamp(min=1)  # none, where the first is skipped
        mean = state["exp_avg"].lerp_(grad, taken * (1 - beta1)) / (1 - beta1**steps)
        square = state["exp_avg_sq"].lerp_(grad.square(), taken * (1 - beta2)) / (1 - beta2**steps)
        parameter.sub_(mean / (square.sqrt() + group["eps"]) * (taken * group["lr"]))


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a weight has at least two rows and two columns."""
    return parameter.ndim > 1 and min(parameter.shape[0], parameter[0].numel()) > 1


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix of each, with singular values of 0.7 to 1.3.

    matrices (n, rows, columns), of which the result has the shape. Directions of less than a
    hundredth of the norm come out smaller. Rows, or columns if fewer, become orthogonal.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    each = matrices.mT if tall else matrices
    each = each / each.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for a, b, c in ROUNDS:
        square = each @ each.mT
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        each = torch.baddbmm(each, factor, each, beta=a)
    return each.mT.contiguous() if tall else each

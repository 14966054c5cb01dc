"""An optimizer that gives each matrix an orthogonal step: more is learned from each batch."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sbkit.config.ranges import NOT_NEGATIVE, SHARE

# Three rounds of x -> a x + b x^3 + c x^5 bring singular values of 0.01 to 1 to between 0.73 and
# 1.27, each by the factors that are best for the values it meets (Amsel et al. 2025,
# arXiv:2505.16932). Nine tenths of those of `hparams/ctc.yaml` are above 0.01. Five rounds of
# Jordan's one polynomial trained as well in 1.7 times the time; two rounds learned more slowly.
ROUNDS = (
    (8.0934, -23.6206, 17.4463),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)


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
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; return what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            vectors, matrices = list[Tensor](), defaultdict[torch.Size, list[Tensor]](list)
            for each in group["params"]:
                if each.grad is not None:
                    (matrices[each.shape] if is_matrix(each) else vectors).append(each)
            self._step_vectors(vectors, group)
            for alike in matrices.values():
                self._step_matrices(alike, group)
        return loss

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step weights of one shape together: one product of all is faster than one of each."""
        averages = [
            self._state_of(each, "momentum_buffer")["momentum_buffer"] for each in parameters
        ]
        grads = torch.stack([each.grad for each in parameters if each.grad is not None])
        grad_scale, found_inf = self._told()
        if grad_scale is not None:
            grads /= grad_scale
        taken = grads.new_ones(())
        if found_inf is not None:  # on the device: 1 where the step is to be skipped
            taken = (found_inf.to(grads.device) == 0).to(grads.dtype)
            grads.nan_to_num_(0.0, 0.0, 0.0).mul_(taken)
        average = torch.stack(averages).lerp_(grads, taken * (1 - group["momentum"]))
        torch._foreach_copy_(averages, average.unbind())
        # Nesterov's: the average as it would be with this gradient once more.
        steps = orthogonalize(grads.lerp_(average, group["momentum"]).flatten(2))
        # The root mean square of an orthogonal matrix is 1 / sqrt of its longer side.
        size = group["lr"] * group["update_rms"] * max(steps.shape[1:]) ** 0.5
        steps = steps.view_as(grads).mul_(-size * taken)
        torch._foreach_mul_(parameters, 1 - taken * group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, steps.unbind())

    def _step_vectors(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        grad_scale, found_inf = self._told()
        states = [self._state_of(each, "exp_avg", "exp_avg_sq") for each in parameters]
        adamw(
            parameters,
            [each.grad for each in parameters if each.grad is not None],
            [each["exp_avg"] for each in states],
            [each["exp_avg_sq"] for each in states],
            [],
            [each["step"] for each in states],
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _told(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what GradScaler sets for a step: `grad_scale` and `found_inf`."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _state_of(self, parameter: Tensor, *names: str) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update({name: torch.zeros_like(parameter) for name in names})
            if "exp_avg" in names:
                state["step"] = torch.zeros((), device=parameter.device)
        return state


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a weight has at least two rows and two columns."""
    return parameter.ndim > 1 and min(parameter.shape[0], parameter[0].numel()) > 1


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix of each, with singular values of 0.7 to 1.3.

    matrices (n, rows, columns), of which the result has the shape. Directions of less than a
    hundredth of the norm come out smaller. Rows, or columns if fewer, become orthogonal.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    # The rounds run on wide @ wide.mT, and what they multiply by meets ``wide`` once: 0.7 of the
    # time of rounds on ``wide`` itself.
    square = wide @ wide.mT
    product = factor = _factor(square, ROUNDS[0])
    for each in ROUNDS[1:]:
        square = factor @ square @ factor
        factor = _factor(square, each)
        product = factor @ product
    near: Tensor = product @ wide
    return near.mT.contiguous() if tall else near


def _factor(square: Tensor, polynomial: tuple[float, float, float]) -> Tensor:
    """Return a + b S + c S^2 of each matrix S = X X^T, by which X becomes a X + b X^3 + c X^5."""
    a, b, c = polynomial
    factor: Tensor = torch.baddbmm(square, square, square, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor

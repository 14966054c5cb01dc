"""An optimizer that gives each matrix an orthogonal step: more is learned from each batch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sbkit.config.ranges import AT_LEAST_ONE, NOT_NEGATIVE, Range, refuse_out_of_range

# Three rounds of x -> a x + b x^3 + c x^5 bring singular values of 0.01 to 1 to between 0.73 and
# 1.27, each by the factors that are best for the values it meets (Amsel et al. 2025,
# arXiv:2505.16932). Nine tenths of those of `hparams/ctc.yaml` are above 0.01. Five rounds of
# Jordan's one polynomial trained as well in 1.7 times the time; two rounds learned more slowly.
ROUNDS = (
    (8.0934, -23.6206, 17.4463),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
TINY = 1e-30  # what is divided by is at least this
BELOW_ONE = Range(low=0, high=0.99999, advice="At 1 no gradient would count.")


class Muon(Optimizer):
    """Step weights by their orthogonalized momentum, and vectors as AdamW does.

    A weight of more than two dimensions, such as a convolution's, is the matrix of its first
    dimension by the others. One of complex numbers steps as a vector, and so does one whose matrix
    has a single row or column.

    params: parameters, or groups of them. lr: of both kinds. update_rms: root mean square of the
    step of a matrix, in units of lr; AdamW's is between 0.2 and 0.4. momentum: of matrices.
    refresh: the factor that makes a matrix orthogonal is computed once in so many steps, and used
    in all of them. betas, eps: AdamW's, of vectors. weight_decay: of both, decoupled, in units of
    lr.

    Sources: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982 (one lr for both kinds);
    Anil et al. 2020, arXiv:2002.09018 (a factor for several steps, in Shampoo).
    """

    # A skipped step is told on the device, as to fused optimizers: the host does not wait for it.
    _step_supports_amp_scaling = True
    RANGES: ClassVar = {
        **dict.fromkeys(("lr", "update_rms", "eps", "weight_decay"), NOT_NEGATIVE),
        **dict.fromkeys(("momentum", "betas[0]", "betas[1]"), BELOW_ONE),
        "refresh": AT_LEAST_ONE,
    }

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        update_rms: float = 0.4,
        momentum: float = 0.95,
        refresh: int = 4,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "update_rms": update_rms,
            "momentum": momentum,
            "refresh": refresh,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "fused": True,  # by which torch loads the steps of a vector to its device
        }
        beta1, beta2 = betas
        refuse_out_of_range({**defaults, "betas[0]": beta1, "betas[1]": beta2}, self.RANGES)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; return what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            vectors, matrices = list[Tensor](), defaultdict[Any, list[Tensor]](list)
            for each in group["params"]:
                if each.grad is not None:
                    kind = each.shape, each.dtype, each.device
                    (matrices[kind] if is_matrix(each) else vectors).append(each)
            self._step_vectors(vectors, group)
            for alike in matrices.values():
                self._step_matrices(alike, group)
        return loss

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step weights of one shape."""
        states = [self._state_of(each, "momentum_buffer") for each in parameters]
        averages = [each["momentum_buffer"] for each in states]
        grads, taken = self._usable(parameters, averages)
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        # Nesterov's: the average as it would be with this gradient once more.
        wanted = torch._foreach_lerp(grads, averages, group["momentum"])
        matrices = [each.flatten(1) for each in wanted]
        pairs = zip(self._factors(matrices, states, group), matrices, strict=True)
        near = [multiply(factor, matrix) for factor, matrix in pairs]
        # To a root mean square of update_rms: the factor of another step does not give one.
        # Averages too small to be squared, as gradients that stay at zero leave them, make no step.
        root = near[0].numel() ** 0.5
        norms = torch.stack(torch._foreach_norm(near)).clamp(min=max(group["eps"] * root, TINY))
        size = taken * group["lr"] * group["update_rms"] * root
        torch._foreach_mul_(near, list((-size / norms).unbind()))
        torch._foreach_mul_(parameters, 1 - taken * group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, [each.view(parameters[0].shape) for each in near])

    def _usable(
        self, parameters: list[Tensor], averages: list[Tensor]
    ) -> tuple[list[Tensor], float | Tensor]:
        """Return the gradients, and 1 where the step is to be taken, 0 where it is skipped."""
        grads = [each.grad for each in parameters if each.grad is not None]
        grad_scale, found_inf = self._told()
        if grad_scale is not None:
            grads = list(torch._foreach_div(grads, grad_scale))
        if found_inf is None:
            return grads, 1.0
        taken = found_inf.to(averages[0].device) == 0
        # The average of itself and itself stays as it is.
        pairs = zip(grads, averages, strict=True)
        return [torch.where(taken, one, other) for one, other in pairs], taken.to(torch.float32)

    def _factors(
        self, matrices: Sequence[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> list[Tensor]:
        """Compute the factors of matrices, or take those of an earlier step."""
        is_due = any(each["step"] % group["refresh"] == 0 for each in states)
        factors = orthogonal_factors(torch.stack(list(matrices))).unbind() if is_due else ()
        for state, factor in zip(states, factors, strict=is_due):
            state["factor"] = factor.clone()
        for state in states:
            state["step"] += 1
        return [each["factor"] for each in states]

    def _step_vectors(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        grad_scale, found_inf = self._told()
        states = [self._state_of(each, "exp_avg", "exp_avg_sq") for each in parameters]
        adamw(
            _real(parameters),
            _real(each.grad for each in parameters if each.grad is not None),
            _real(each["exp_avg"] for each in states),
            _real(each["exp_avg_sq"] for each in states),
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

    def _state_of(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update({name: torch.zeros_like(parameter) for name in names})
            # Of a vector torch counts the steps on the device; of a matrix the host needs to know.
            state["step"] = 0 if is_matrix(parameter) else torch.zeros((), device=parameter.device)
        return state


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a weight has at least two rows and two columns of real numbers."""
    is_real = not parameter.is_complex()
    return is_real and parameter.ndim > 1 and 1 < parameter.shape[0] < parameter.numel()


def _real(tensors: Iterable[Tensor]) -> list[Tensor]:
    """View complex numbers as pairs of real ones, which a fused kernel takes."""
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def orthogonal_factors(matrices: Tensor) -> Tensor:
    """Return for each matrix the square one whose product with it is nearly orthogonal.

    matrices (n, rows, columns) -> (n, m, m) with m the fewer of both; `multiply` gives the product.
    Its singular values are 0.7 to 1.3, and smaller where they were below a hundredth of the norm.
    """
    square = matrices.mT @ matrices if _is_tall(matrices) else matrices @ matrices.mT
    square /= square.diagonal(dim1=1, dim2=2).sum(1).clamp(min=TINY)[:, None, None]
    # The rounds run on this square: 0.7 of the time of rounds on the matrices themselves.
    product = factor = _polynomial(square, ROUNDS[0])
    for each in ROUNDS[1:]:
        square = factor @ square @ factor
        factor = _polynomial(square, each)
        product = factor @ product
    return product


def multiply(factor: Tensor, matrix: Tensor) -> Tensor:
    """Multiply a matrix by its factor, from the side where that has its size."""
    return matrix @ factor if _is_tall(matrix) else factor @ matrix


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _polynomial(square: Tensor, polynomial: tuple[float, float, float]) -> Tensor:
    """Return a + b S + c S^2 of each matrix S = X X^T, by which X becomes a X + b X^3 + c X^5."""
    a, b, c = polynomial
    factor: Tensor = torch.baddbmm(square, square, square, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor

"""Build a model of others within what its weights can fill.

A configuration of a hundred bytes can ask for terabytes. The header of the weights' file says how
large the model is, so building it may take a few times that and no more: every operation of torch
is run on the meta device first, which has sizes but no memory, and counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sbkit.base.errors import SbkitError

SPARE_BYTES = 1 << 28  # of windows, filters and tables of positions, which are no weights
TIMES_BYTES = 8  # weights are drawn and copied while a part is built
SPARE_CALLS, CALLS_PER_TENSOR = 5_000, 50
SPARE_MODULES, MODULES_PER_TENSOR = 1_000, 8


@contextmanager
def within_budget(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop building as soon as it takes more than the weights can account for.

    Raises SbkitError.
    """
    modules_left = SPARE_MODULES + MODULES_PER_TENSOR * len(weights)

    def count(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal modules_left
        modules_left -= 1
        if modules_left < 0:
            raise _too_large("modules")

    with register_module_module_registration_hook(count), _Budget(weights):
        yield


class _Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count what every operation would allocate before it does."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes = SPARE_BYTES + TIMES_BYTES * sum(each.nbytes for each in weights.values())
        self._calls = SPARE_CALLS + CALLS_PER_TENSOR * len(weights)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no, since yes imports the compiler, which takes 1.2 s; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")  # a configuration does not choose the device
        self._calls -= 1
        self._bytes -= _measure(func, args, kwargs)
        if self._calls < 0 or self._bytes < 0:
            raise _too_large("operations" if self._calls < 0 else "memory")
        return func(*args, **kwargs)


def _measure(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the bytes of what an operation makes anew."""
    if func.__name__.split(".")[0].endswith("_"):
        return 0  # in place
    like_args, like_kwargs = tree_map_only(Tensor, _on_meta, (tuple(args), dict(kwargs)))
    if "device" in like_kwargs or not any(isinstance(each, Tensor) for each in tree_leaves(args)):
        like_kwargs["device"] = torch.device("meta")
    try:
        made = func(*like_args, **like_kwargs)
    except (NotImplementedError, RuntimeError, TypeError):
        return 0  # it depends on values, which are no more than what it is given
    return sum(
        each.untyped_storage().nbytes() for each in tree_leaves(made) if isinstance(each, Tensor)
    )


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _too_large(what: str) -> SbkitError:
    return SbkitError(
        "A bundle's parts must be of the size of its weights, but building them takes more "
        f"{what} than those can fill. Export it again."
    )

"""Count how often the host asks for a value that lives on the device, on a machine without one.

What lives there is told by its storage: the model's parameters, what a batch moves, and whatever is
computed from either.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What makes a host wait on CUDA: reading a value, or a shape that depends on values.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
READING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Residence(TorchDispatchMode):
    """Follow what is computed from the device's tensors; ``waits`` names every look at one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive: an address is used again

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """Say that these live on the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def lives_there(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is computed from the device's."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; its results live where any of its inputs does."""
        output = function(*args, **(kwargs or {}))
        if any(map(self.lives_there, _tensors((args, kwargs)))):
            name = function._schema.name.removeprefix("aten::")
            if name.startswith(WAITING):
                self.waits.append(name)
            self.settle(_tensors(output))
        return output

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Also note the reads of a tensor that reach no operation on the CPU."""
        with ExitStack() as patches, self:
            for name in READING:
                noted = self._noting(name, getattr(Tensor, name))
                patches.enter_context(patch.object(Tensor, name, noted))
            yield

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.lives_there(tensor):
                self.waits.append(name)
            return original(tensor, *args, **kwargs)

        return read


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

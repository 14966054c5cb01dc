"""How much memory tensors take, where the device does not count it itself."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the tensors that are made inside and still alive, and remember the most.

    What an operation takes while it runs is not seen. Each one costs about ten microseconds more.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Start at zero; ``known`` tensors do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._known = {each.untyped_storage()._cdata for each in known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch imports it first: 1.2 s; nothing is compiled in here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and count what it makes."""
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self._add(each.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Allocated:
    """Read the same from CUDA's allocator, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0

    def __enter__(self) -> "Allocated":
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


def measure_memory(known: Iterable[Tensor], device: torch.device) -> MemoryTracker | Allocated:
    """Measure what is made inside a `with`, by the device's own count where it has one."""
    return Allocated(device) if device.type == "cuda" else MemoryTracker(known)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)

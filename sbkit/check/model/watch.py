"""Which tensors follow the model's device: found on the CPU, where every device is the same.

A Brain cannot be made on `meta` (autocast and GradScaler refuse it), and SpeechBrain's encoder
cannot run there (it asks for the value of the longest length). So what moves is watched instead.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbkit.config.document import Keys

MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as, Tensor.copy_)
TAKE_FROM_CPU = (  # lengths or places, beside what they are of
    *(Tensor.__getitem__, Tensor.__setitem__, torch._VF._pack_padded_sequence),
    *(torch.ctc_loss, nn.functional.ctc_loss),
)


class MoveWatch(TorchFunctionMode):
    """Note every tensor that is moved to a device or made on one."""

    def __init__(self) -> None:
        super().__init__()
        self._moved: dict[int, Tensor] = {}  # keeps them, or an id would come twice

    def __contains__(self, tensor: object) -> bool:
        """Return whether a tensor was moved, or made where it belongs."""
        return id(tensor) in self._moved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and note what was moved and the result."""
        result = func(*args, **(kwargs or {}))
        if func in MOVES or (kwargs or {}).get("device") is not None:
            for each in (*args[:1], result):
                if isinstance(each, Tensor):
                    self._moved[id(each)] = each
        return result


class UseWatch(TorchFunctionMode):
    """Find which of some tensors are used with others without having been moved to their device.

    What is computed from such tensors alone, or from none, is on the CPU as well, and so is what is
    made without naming a device; a scalar tensor may be used on any device.
    ``inside()`` names the modules that are running, which are kept with each parameter that is used
    and with what is `made`.
    """

    def __init__(self, candidates: Iterable[Tensor], inside: Callable[[], Sequence[Keys]]) -> None:
        super().__init__()
        self._beside: dict[int, tuple[Tensor, Tensor | None]] = {}  # and what it is made of
        self._inside = inside
        self.unmoved: dict[int, Tensor] = {}
        self.made: dict[int, tuple[str, tuple[Keys, ...]]] = {}  # and by which function
        self.used: dict[int, tuple[nn.Parameter, tuple[Keys, ...]]] = {}
        for tensor in candidates:
            self._beside[id(tensor)] = tensor, tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and note which tensors are used together."""
        result = func(*args, **(kwargs or {}))
        taken = list(tensors_in((*args, *(kwargs or {}).values())))
        for each in taken:
            if isinstance(each, nn.Parameter) and id(each) not in self.used:
                self.used[id(each)] = each, tuple(self._inside())
        given = [each for each in taken if each.ndim > 0]
        known = [self._beside.get(id(each)) for each in given]
        origins = [origin for _, origin in filter(None, known) if origin is not None]
        if func in MOVES and not any(isinstance(each, torch.dtype) for each in args):
            return result.view_as(result) if origins else result
        if not taken and isinstance(result, Tensor) and (kwargs or {}).get("device") is None:
            self.made[id(result)] = func.__name__, tuple(self._inside())
            self._beside[id(result)] = result, result
        elif None in known:
            if func in TAKE_FROM_CPU and id(args[0]) not in self._beside:
                return result
            self.unmoved |= {id(each): each for each in origins}
        elif isinstance(result, Tensor):
            self._beside[id(result)] = result, next(iter(origins), None)
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or those in lists and tuples, also nested ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)

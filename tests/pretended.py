"""A stand-in for a GPU: a device that torch takes for a real one, computed by the CPU.

Its tensors say that they are on `pretended:0`, cannot be mixed with those of the CPU, as on CUDA,
and have a random generator of their own. What would make the host wait for a GPU is noted in
`waits`. Importing this changes the process for good, so only `tests/on_pretended.py` does.

Not as on a GPU: nothing runs asynchronously, memory cannot be pinned, there is one device, files
hold its tensors as those of the CPU, and operations that are fused on GPUs only (GRU, LSTM), that
change a shape in place, or `torch.load` to the device, fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration

from sbkit.distributed import device as sbkit_device

NAME = "pretended"
CPU = torch.device("cpu")

# Names of torch's operations. Those whose result the host has to wait for on CUDA:
READING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # takes indices of the CPU
CTC = {"_ctc_loss", "_ctc_loss_backward"}  # takes lengths of the CPU
CASTING = ("linear", "matmul", "mm", "bmm", "addmm", "conv1d", "scaled_dot_product_attention")
STAGED = 65_536  # bytes a copy from memory that is not pinned blocks only above this

waits: list[str] = []


class Accelerator(backend_registration._DummyBackendModule):
    """The module `torch.pretended`."""

    def __init__(self) -> None:
        self._random = torch.get_rng_state()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; `torch.manual_seed` calls this."""
        self._random = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return the generator's state."""
        return self._random.clone()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Set the generator's state."""
        self._random = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return what autocast takes."""
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        """Wait for nothing."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the device's generator, in operations that know only that of the CPU."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random)
        yield
        self._random = torch.get_rng_state()
        torch.set_rng_state(before)


accelerator = Accelerator()
backend_registration._setup_privateuseone_for_python_backend(NAME, accelerator)
DEVICE = torch.device(NAME, 0)


class Pretended(Tensor):
    """A tensor on the device; its values are those of `held`, on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    # With these a module moves a parameter without making another one of it, as to a GPU.
    __tensor_flatten__ = __tensor_unflatten__ = None

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        """Put a tensor on the device."""
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        make = Tensor._make_wrapper_subclass
        made: Pretended = make(cls, held.shape, dtype=held.dtype, device=DEVICE, **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that takes such a tensor."""
        return execute(operation, *args, **(kwargs or {}))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Show the values."""
        return f"{NAME}({self.held})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a tensor of the CPU."""
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """Read all values; torch refuses this of a subclass."""
        return self.cpu().tolist()


def execute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU, and put its results on the device unless meant for the CPU."""
    name = operation.overloadpacket.__name__
    refuse_mixing(operation, name, args, kwargs)
    waits.extend(waited_for(name, args, kwargs))
    target = kwargs.get("device")
    held_args, held = changed((args, kwargs), lambda each: each.held if is_there(each) else each)
    if target is not None:
        held["device"] = CPU
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    with accelerator.drawing() if draws else nullcontext():
        made = operation(*held_args, **held)
    if target is not None and torch.device(target) == CPU:
        return made
    given = {id(each.held if is_there(each) else each): each for each in tensors_in(args, kwargs)}
    return changed(made, lambda each: given[id(each)] if id(each) in given else Pretended(each))


def is_there(each: object) -> bool:
    """Return whether something is a tensor on the device."""
    return isinstance(each, Pretended)


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors among arguments; torch's own pytree takes most of the time of a run."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([changed(each, change) for each in tree])
    if isinstance(tree, dict):
        return {name: changed(each, change) for name, each in tree.items()}
    return tree


def tensors_in(*tree: Any) -> list[Any]:
    """List the tensors among arguments."""
    found: list[Any] = []
    for each in tree:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors_in(*each)
        elif isinstance(each, dict):
            found += tensors_in(*each.values())
    return found


def refuse_mixing(operation: Any, name: str, args: Any, kwargs: Any) -> None:
    """Refuse tensors and generators of the CPU beside the device's, as CUDA does."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if name in {"copy_", "_to_copy", "_pack_padded_sequence"} or (
        name in CTC and is_there(args[0])
    ):
        return
    mixed = tensors_in(args[:1], args[2:] if name in INDEXING else args[1:], kwargs)
    numbers_may = torch.Tag.pointwise in operation.tags or name in INDEXING
    here = [each for each in mixed if not (is_there(each) or (numbers_may and each.ndim == 0))]
    if here and any(map(is_there, tensors_in(args, kwargs))):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and {here[0].device} ({name}, {tuple(here[0].shape)})"
        )


def waited_for(name: str, args: Any, kwargs: Any) -> Iterator[str]:
    """Yield what the host would wait for."""
    if name in READING:
        yield name
    elif name == "_to_copy" and torch.device(kwargs.get("device") or DEVICE) == CPU:
        yield "copy to the host"
    elif name == "copy_":
        to, source, *non_blocking = args
        if not is_there(to):
            yield "copy to the host"
        elif not is_there(source):
            is_quick = (any(non_blocking) or kwargs.get("non_blocking")) and source.nbytes <= STAGED
            if not is_quick:
                yield f"blocking copy of {tuple(source.shape)} to the device"
    elif name in INDEXING:
        indices = tensors_in(args[1])
        if not all(map(is_there, indices)):
            yield "blocking copy of indices to the device"
        is_fill = len(indices) == 1 and len(args) > 2 and args[2].numel() == 1
        if not is_fill and any(each.dtype in {torch.bool, torch.uint8} for each in indices):
            yield "indexing by a mask"


def casting(operation: Any) -> Any:
    """Make an operation that casts its inputs first, as CUDA's autocast does."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(each: Tensor) -> Tensor:
        is_wide = each.dtype is torch.float32 and is_there(each)
        return each.to(torch.get_autocast_dtype(NAME)) if is_wide else each

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*changed(args, cast), **kwargs)

    return run


# Operations without tensors, copies from within torch.tensor(), and autocast.
everything = torch.library.Library("_", "IMPL")
everything.fallback(execute, "PrivateUse1")
everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
aten = torch.library.Library("aten", "IMPL")
aten.impl("copy_", partial(execute, torch.ops.aten.copy_.default), "PrivateUse1")
for name in CASTING:
    aten.impl(name, casting(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")

# What knows only its own types or devices: torch's optimizers, sbkit's `device`.
for module in (optimizer, _foreach_utils):
    module._foreach_supported_types.append(Pretended)
parse_device = sbkit_device.parse_device


def parse_there(device: Any, **key: str) -> torch.device:
    """Parse, also the device's name."""
    return torch.device(device) if str(device).startswith(NAME) else parse_device(device, **key)


sbkit_device.parse_device = parse_there
sbkit_device.PRECISIONS_OF[NAME] = ("fp32", "bf16", "fp16")

"""A pretended accelerator: torch treats it as a device, and the CPU computes its results.

Its tensors are on `pretended:0`, cannot be mixed with CPU tensors, as on CUDA, and the device has
its own random generator. Operations that would make the host wait for a GPU are recorded in
`waits`. Importing this module changes the process permanently, so only `tests/on_pretended.py`
imports it.

Differences from a GPU: nothing runs asynchronously, memory cannot be pinned, there is one device,
and its tensors are saved as CPU tensors. Operations that are fused only on GPUs (GRU, LSTM), that
change a shape in place, and `torch.load` to the device fail.
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
from sbkit.runtime.torch_model import TorchModel

NAME = "pretended"
CPU = torch.device("cpu")

# Names of torch's operations. The host waits for the result of these on CUDA:
READING_OPERATIONS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
INDEXING_OPERATIONS = {"index", "index_put", "index_put_", "_index_put_impl_"}  # on CPU indices
CTC_OPERATIONS = {"_ctc_loss", "_ctc_loss_backward"}  # take CPU lengths
AUTOCAST_OPERATIONS = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "conv1d",
    "scaled_dot_product_attention",
)
MAX_STAGED_BYTES = 65_536  # larger copies from unpinned memory block

waits: list[str] = []


class Accelerator(backend_registration._DummyBackendModule):
    """The module `torch.pretended`."""

    def __init__(self) -> None:
        self._random = torch.get_rng_state()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; `torch.manual_seed` calls this."""
        self._random = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: object = None) -> Tensor:
        return self._random.clone()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self._random = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        """Do nothing: every operation has already finished."""

    @contextmanager
    def random_generator(self) -> Iterator[None]:
        """Let operations that draw from the CPU's generator draw from the device's."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random)
        yield
        self._random = torch.get_rng_state()
        torch.set_rng_state(before)


accelerator = Accelerator()
backend_registration._setup_privateuseone_for_python_backend(NAME, accelerator)
DEVICE = torch.device(NAME, 0)


class Pretended(Tensor):
    """A tensor on the device; its values are in `cpu_tensor`."""

    cpu_tensor: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    # Because of these attributes, a module moves a parameter in place, as it does on a GPU.
    __tensor_flatten__ = __tensor_unflatten__ = None

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> "Pretended":
        layout = {"strides": cpu_tensor.stride(), "storage_offset": cpu_tensor.storage_offset()}
        make = Tensor._make_wrapper_subclass
        tensor: Pretended = make(
            cls, cpu_tensor.shape, dtype=cpu_tensor.dtype, device=DEVICE, **layout
        )
        tensor.cpu_tensor = cpu_tensor
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return execute(operation, *args, **(kwargs or {}))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{NAME}({self.cpu_tensor})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """Read all values; torch refuses this for a subclass."""
        return self.cpu().tolist()


def execute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU; put its results on the device unless its target is the CPU."""
    name = operation.overloadpacket.__name__
    refuse_mixing(operation, name, args, kwargs)
    waits.extend(waits_of(name, args, kwargs))
    target = kwargs.get("device")
    cpu_args, cpu_kwargs = map_tensors((args, kwargs), to_cpu_tensor)
    if target is not None:
        cpu_kwargs["device"] = CPU
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    with accelerator.random_generator() if draws else nullcontext():
        result = operation(*cpu_args, **cpu_kwargs)
    if target is not None and torch.device(target) == CPU:
        return result
    inputs = {id(to_cpu_tensor(tensor)): tensor for tensor in tensors_in(args, kwargs)}
    return map_tensors(
        result, lambda tensor: inputs[id(tensor)] if id(tensor) in inputs else Pretended(tensor)
    )


def is_pretended(value: object) -> bool:
    return isinstance(value, Pretended)


def to_cpu_tensor(tensor: Any) -> Any:
    return tensor.cpu_tensor if is_pretended(tensor) else tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Map the tensors among arguments; torch's pytree would take most of the time of a run."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(item, function) for item in tree])
    if isinstance(tree, dict):
        return {name: map_tensors(item, function) for name, item in tree.items()}
    return tree


def tensors_in(*tree: Any) -> list[Any]:
    tensors: list[Any] = []
    for item in tree:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple):
            tensors += tensors_in(*item)
        elif isinstance(item, dict):
            tensors += tensors_in(*item.values())
    return tensors


def refuse_mixing(operation: Any, name: str, args: Any, kwargs: Any) -> None:
    """Refuse CPU tensors and generators beside those on the device, as CUDA does."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if name in {"copy_", "_to_copy", "_pack_padded_sequence"} or (
        name in CTC_OPERATIONS and is_pretended(args[0])
    ):
        return
    is_indexing = name in INDEXING_OPERATIONS
    checked = tensors_in(args[:1], args[2:] if is_indexing else args[1:], kwargs)
    takes_cpu_scalars = torch.Tag.pointwise in operation.tags or is_indexing
    on_cpu = [
        tensor
        for tensor in checked
        if not (is_pretended(tensor) or (takes_cpu_scalars and tensor.ndim == 0))
    ]
    if on_cpu and any(map(is_pretended, tensors_in(args, kwargs))):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and {on_cpu[0].device} ({name}, {tuple(on_cpu[0].shape)})"
        )


def waits_of(name: str, args: Any, kwargs: Any) -> Iterator[str]:
    """Yield the reasons for which the host would wait."""
    if name in READING_OPERATIONS:
        yield name
    elif name == "_to_copy" and torch.device(kwargs.get("device") or DEVICE) == CPU:
        yield "copy to the host"
    elif name == "copy_":
        to, source, *non_blocking = args
        if not is_pretended(to):
            yield "copy to the host"
        elif not is_pretended(source):
            is_quick = (
                any(non_blocking) or kwargs.get("non_blocking")
            ) and source.nbytes <= MAX_STAGED_BYTES
            if not is_quick:
                yield f"blocking copy of {tuple(source.shape)} to the device"
    elif name in INDEXING_OPERATIONS:
        indices = tensors_in(args[1])
        if not all(map(is_pretended, indices)):
            yield "blocking copy of indices to the device"
        is_fill = len(indices) == 1 and len(args) > 2 and args[2].numel() == 1
        if not is_fill and any(index.dtype in {torch.bool, torch.uint8} for index in indices):
            yield "indexing by a mask"


def autocast(operation: Any) -> Any:
    """Return an operation that casts its inputs first, as autocast of CUDA does."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(tensor: Tensor) -> Tensor:
        is_fp32 = tensor.dtype is torch.float32 and is_pretended(tensor)
        return tensor.to(torch.get_autocast_dtype(NAME)) if is_fp32 else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*map_tensors(args, cast), **kwargs)

    return run


# Operations without tensors, copies from within torch.tensor(), and autocast.
fallbacks = torch.library.Library("_", "IMPL")
fallbacks.fallback(execute, "PrivateUse1")
fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
aten = torch.library.Library("aten", "IMPL")
aten.impl("copy_", partial(execute, torch.ops.aten.copy_.default), "PrivateUse1")
for name in AUTOCAST_OPERATIONS:
    aten.impl(name, autocast(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")

# Torch's optimizers and sbkit's `parse_device` accept only listed types and devices.
for module in (optimizer, _foreach_utils):
    module._foreach_supported_types.append(Pretended)
parse_device = sbkit_device.parse_device


def parse_pretended(device: Any, **key: str) -> torch.device:
    return torch.device(device) if str(device).startswith(NAME) else parse_device(device, **key)


sbkit_device.parse_device = parse_pretended
sbkit_device.PRECISIONS_BY_DEVICE_TYPE[NAME] = ("fp32", "bf16", "fp16")

# A view of a parameter cannot be made in inference mode, as it can on a real device.
for name, method in vars(TorchModel).copy().items():
    if callable(method) and hasattr(method, "__wrapped__"):
        setattr(TorchModel, name, torch.no_grad()(method.__wrapped__))

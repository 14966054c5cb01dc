"""The private parts of torch that sbkit uses, tested with torch 2.11.0 and torch 2.15.0.

Before you change the version of torch, read this file and run tests/base/test_torch_internals.py.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.distributed_c10d import _abort_process_group
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._device import _device_constructors

# NCCL's `destroy_process_group` would wait for ranks that never come.
abort_process_group: Callable[[], object] = _abort_process_group


def multiply_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a factor on their device, in a few kernels."""
    torch._foreach_mul_(gradients, factor)


def found_inf_tensors(scaler: GradScaler, optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the flags, one tensor per device, that make a scaler skip an optimizer's step."""
    return scaler._found_inf_per_device(optimizer).values()


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, such as a fused one, reads the flag on the device itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def batch_norms(modules: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the batch normalizations of any dimension, including synchronized ones."""
    return (module for module in modules.modules() if isinstance(module, _BatchNorm))


def meta_device() -> torch.device:
    """Return the device of tensors without memory, for a `with` statement.

    While transformers loads a model, it replaces torch.linspace. If torch then made its list of the
    functions that obey such a statement, the original would still fill memory.
    """
    _device_constructors.cache_clear()
    return torch.device("meta")


def set_recompile_limit(limit: int) -> None:
    """Set how many variants of a module class torch.compile makes before it gives up."""
    import_module("torch._dynamo").config.recompile_limit = limit


def create_cuda_graph_store() -> None:
    """Create this thread's store for the CUDA graphs of compiled code (pytorch #123177).

    Before 2.14, torch created it only in the thread that imports the module.
    """
    local = import_module("torch._inductor.cudagraph_trees").local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(threading.Lock)


@cache
def keep_device_guard() -> None:
    """Make torch's stand-in for CUDA's device guard in a thread that never ends; once.

    Without a GPU, the first tracing (torch.compile, torch.export) makes it in its own thread. Its
    address outlives the thread, so the next tracing caused a segmentation fault.
    """
    is_ready = threading.Event()

    def make_and_keep() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_ready.set()
        threading.Event().wait()

    threading.Thread(target=make_and_keep, name="device guard", daemon=True).start()
    is_ready.wait()

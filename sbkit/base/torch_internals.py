"""The private parts of torch that sbkit uses, tried with torch 2.11.0.

Whoever changes the version of torch reads this file and runs tests/base/test_torch_internals.py.
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

# NCCL's `destroy_process_group` would wait for ranks that never come.
abort_process_group: Callable[[], object] = _abort_process_group


def multiply_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a factor on their device, in a few kernels."""
    torch._foreach_mul_(gradients, factor)


def found_inf_tensors(scaler: GradScaler, optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the tensors, one per device, that make a scaler skip the step of an optimizer."""
    return scaler._found_inf_per_device(optimizer).values()


def batch_norms(modules: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the batch normalizations of any dimension, synchronized ones included."""
    return (module for module in modules.modules() if isinstance(module, _BatchNorm))


def assume(condition: object) -> None:
    """Tell a tracer that a condition on a size holds, which it cannot derive from the data."""
    torch._check(condition)  # type: ignore[no-untyped-call]


def set_recompile_limit(limit: int) -> None:
    """Set how many variants of a class of modules torch.compile makes before it gives up."""
    import_module("torch._dynamo").config.recompile_limit = limit


def leave_uncompiled(function: Callable[..., object]) -> None:
    """Call a function from compiled code as it is."""
    import_module("torch._dynamo").disallow_in_graph(function)


def own_cuda_graphs() -> None:
    """Create this thread's store for the CUDA graphs of compiled code.

    torch creates it for the thread that imports the module, and asserts in any other one
    (`assert torch._C._is_key_in_tls`, pytorch #123177).
    """
    local = import_module("torch._inductor.cudagraph_trees").local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(threading.Lock)


@cache
def keep_device_guard() -> None:
    """Make torch's stand-in for CUDA's device guard in a thread that never ends; once.

    Without a GPU, the first tracing (torch.compile, torch.export) makes it in its own thread and
    writes its address into a table of the process (`c10::impl::ensureCUDADeviceGuardSet`). The
    address stays when that thread ends, and the next tracing was a segmentation fault.
    """
    is_made = threading.Event()

    def make_and_keep() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_made.set()
        threading.Event().wait()

    threading.Thread(target=make_and_keep, name="device guard", daemon=True).start()
    is_made.wait()

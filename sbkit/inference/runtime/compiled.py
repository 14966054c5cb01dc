"""What compiled code needs of the thread that runs it, and the shapes that it is compiled for."""

import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a model is compiled, and for what shapes: each number of clips with each length.

    mode: default or reduce-overhead; backend: of torch.compile; live: chunks of so many sessions in
    place of clips, None for both.
    """

    mode: str
    clips: tuple[int, ...] = (1, 4)
    seconds: tuple[float, ...] = (5.0, 15.0, 30.0)
    backend: str = "inductor"
    live: bool | None = False


def own_cuda_graphs() -> None:
    """Create the state of this thread in which compiled code keeps its CUDA graphs.

    torch creates it for the thread that imports the module, and asserts in any other one
    (`assert torch._C._is_key_in_tls`, pytorch #123177).
    """
    trees: Any = import_module("torch._inductor.cudagraph_trees")
    if not hasattr(trees.local, "tree_manager_containers"):
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = defaultdict(threading.Lock)


@cache
def keep_device_guard() -> None:
    """Make torch 2.11's stand-in for CUDA's device guard in a thread that never ends; once.

    Without a GPU, the first tracing (torch.compile, torch.export) makes it in its own thread, and
    writes its address into a table of the process (`c10::impl::ensureCUDADeviceGuardSet`). The
    address stays when that thread ends, and the next tracing was a segmentation fault.
    """
    made = threading.Event()

    def keep() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        made.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="device guard", daemon=True).start()
    made.wait()

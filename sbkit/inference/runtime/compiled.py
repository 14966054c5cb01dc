"""A model whose repeated blocks are compiled, for a closed table of shapes, before the first clip.

Compiling takes seconds a shape. So every shape is compiled while the model is loaded, clips are
padded to the next one, and what would be compiled later is an error of torch.

Legend: B clips, S samples.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from sbkit.train.compiling import find_blocks

WARM_UPS = 3  # of a shape: CUDA graphs run once as they are, are recorded, and are replayed
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a model is compiled, and for what shapes: each number of clips with each length.

    mode: default or reduce-overhead; backend: of torch.compile.
    """

    mode: str
    clips: tuple[int, ...] = (1, 4)
    seconds: tuple[float, ...] = (5.0, 15.0, 30.0)
    backend: str = "inductor"


class CompiledBlocks:
    """The compiled blocks of a model; made, warmed up and called in one thread."""

    def __init__(
        self, modules: nn.ModuleList, compilation: Compilation, device: torch.device
    ) -> None:
        """Set the blocks to be compiled, which torch does when one is called first."""
        options = {}
        if compilation.backend == "inductor":
            own_cuda_graphs()
            options["mode"] = compilation.mode
        keep_device_guard()
        self.most_clips = max(compilation.clips)
        self._compilation, self._stance = compilation, "default"
        dynamo: Any = import_module("torch._dynamo")
        dynamo.config.recompile_limit = 1000  # of a class of blocks; here the table limits it
        for part in modules:
            for block in find_blocks(part):
                block.compile(backend=compilation.backend, dynamic=False, **options)

    def warm_up(self, run: Callable[[int, float], object]) -> None:
        """Run every shape of the table; from then on nothing is compiled."""
        for clips, seconds in product(self._compilation.clips, self._compilation.seconds):
            for _ in range(WARM_UPS):
                run(clips, seconds)
        self._stance = "fail_on_recompile"

    def padded(self, clips: int, samples: int, sample_rate: int) -> tuple[int, int]:
        """Return the shape of the table (B, S) for a batch; the batch's own where none is."""
        lengths = sorted(round(each * sample_rate) for each in self._compilation.seconds)
        return (
            next((each for each in sorted(self._compilation.clips) if each >= clips), clips),
            next((each for each in lengths if each >= samples), samples),
        )

    def call(self, run: Callable[[], Result]) -> Result:
        """Call a function that runs the blocks.

        Raises:
            RuntimeError: the blocks are warm, and were not compiled for the shape.
        """
        if self._compilation.mode == "reduce-overhead":
            # Else each block is a step of its own, whose graph may overwrite its own input.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.compiler.set_stance(self._stance):
            return run()


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

"""A closed table of the shapes of batches: what was warmed up is all that runs afterwards.

A new shape costs: torch makes kernels of it, oneDNN and cuDNN choose theirs, and each keeps memory.

Legend: B clips, S samples.

What compiled code needs of the thread that runs it, and the shapes that it is compiled for.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby, product
from typing import Any

import torch

from sbkit.base.units import seconds_to_samples

CLIPS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """How many clips a batch has, and the samples that they are padded to; both ascend.

    clips: from 1; lengths: the last one is that of the longest piece; most: samples, with padding,
    of a batch of several clips.
    """

    clips: tuple[int, ...]
    lengths: tuple[int, ...]
    most: int

    @classmethod
    def of(
        cls,
        sample_rate: int,
        *,
        batch_seconds: float,
        clips: Sequence[int] = CLIPS,
        seconds: Sequence[float] = SECONDS,
    ) -> "Shapes":
        """Make the table for a sample rate."""
        lengths = tuple(seconds_to_samples(each, sample_rate) for each in seconds)
        most = seconds_to_samples(batch_seconds, sample_rate)
        return cls(clips=tuple(clips), lengths=lengths, most=most)

    def pairs(self) -> list[tuple[int, int]]:
        """List all shapes, (B, S)."""
        return [
            (clips, samples)
            for samples, clips in product(self.lengths, self.clips)
            if clips == 1 or clips * samples <= self.most
        ]

    def batches(self, lengths: Sequence[int], *, fewest: int = 1) -> Iterator[list[int]]:
        """Yield the places of clips of these lengths, in batches of the table, the shortest first.

        No row is added: seven clips are batches of four, two and one. There are at least ``fewest``
        batches where there are as many clips.
        """
        padded = [padded_length(each, self.lengths) for each in lengths]
        most = min(self.most, sum(padded) // fewest)
        places = sorted(range(len(lengths)), key=lengths.__getitem__)
        for samples, group in groupby(places, key=padded.__getitem__):
            same = list(group)
            while same:
                fits = min(len(same), most // samples)
                count = max((each for each in self.clips if each <= fits), default=1)
                yield same[:count]
                del same[:count]


def padded_length(samples: int, lengths: Sequence[int]) -> int:
    """Return the first of ascending lengths that holds the samples, or else their own number."""
    return next((each for each in lengths if each >= samples), samples)


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

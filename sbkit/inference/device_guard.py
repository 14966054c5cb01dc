"""Tracing in a thread that ends: torch 2.11 crashes over the next one, and this prevents it.

Where no GPU is, whoever traces first (torch.compile, torch.export) makes a stand-in for CUDA's
device guard, which belongs to its thread, and writes its address into a table of the whole process
(`c10::impl::ensureCUDADeviceGuardSet`). When the thread ends, the address stays: the next tracing,
in any thread, was a segmentation fault. So a thread that never ends makes it first.
"""

import threading
from functools import cache
from importlib import import_module
from typing import Any


@cache
def keep_device_guard() -> None:
    """Let the stand-in belong to a thread that never ends, once in a process."""
    made = threading.Event()
    threading.Thread(target=_make, args=(made,), name="device guard", daemon=True).start()
    made.wait()


def _make(made: threading.Event) -> None:
    torch: Any = import_module("torch")
    torch._C._ensureCUDADeviceGuardSet()
    made.set()
    threading.Event().wait()

"""`profile: True`: what ten steps of the first epoch spend their time on, by torch's profiler."""

import logging
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from sbkit.base.files import write_text_atomically

logger = logging.getLogger(__name__)

WARM_UP, STEPS = 10, 10  # micro-batches
LISTED = 8  # operations
Batched = TypeVar("Batched")


def profiled(batches: Iterator[Batched], folder: Path, device: torch.device) -> Iterator[Batched]:
    """Yield the batches of an epoch, and profile what happens between some of them.

    Writes `profile.txt`, the share of waiting for data and the operations that take the most, and
    `profile.json.gz`, the trace for chrome://tracing or ui.perfetto.dev.
    """
    yield from islice(batches, WARM_UP)
    is_gpu = device.type == "cuda"
    waiting, steps = 0.0, 0
    if not is_gpu:  # the library under torch's profiler reports an error for each GPU not there
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        began = asked = time.perf_counter()
        for batch in islice(batches, STEPS):
            waiting += time.perf_counter() - asked
            yield batch
            steps, asked = steps + 1, time.perf_counter()
        if is_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    if steps:
        order = "self_cuda_time_total" if is_gpu else "self_cpu_time_total"
        operations = profiler.key_averages().table(sort_by=order, row_limit=LISTED)
        verdict = (
            f"profile of {steps} steps: one takes {1000 * seconds / steps:.1f} ms, of which "
            f"{waiting / seconds:.1%} waits for data\n{operations}"
        )
        write_text_atomically(folder / "profile.txt", verdict + "\n")
        trace = folder / "profile.json.gz"
        trace.unlink(missing_ok=True)  # it may be a link to another's file
        profiler.export_chrome_trace(str(trace))
        logger.info(verdict)
    else:
        logger.info(
            f"note: profile: True needs an epoch of more than {WARM_UP} steps; nothing is written."
        )
    yield from batches

"""`profile: True`: what ten steps of the first epoch spend their time with.

Writes `profile.txt`, a verdict of ten lines, and `profile.json.gz`, the trace for
chrome://tracing or ui.perfetto.dev, into the run folder.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from sbkit.base.files import write_text_atomically
from sbkit.logs.log import log

WARM_UP, STEPS = 10, 10  # micro-batches
LISTED = 6  # kernels
KINDS = {  # the first that fits the name of an operation or a kernel
    "attention": r"scaled_dot_product|flash|fmha|sdpa|attention",
    "CTC": r"ctc",
    "convolutions": r"conv|depthwise",
    "matrix products": r"\bmm\b|addmm|bmm|gemm|nvjet|cutlass|linear|xmma|matmul|cublas",
    "optimizer": r"adam|optimizer|multi_tensor|foreach|vector_norm",
    "normalization": r"layer_norm|batch_norm|layernorm|batchnorm|softmax",
    "features": r"fft|stft",
    "copies": r"copy|memcpy|memset|\bcat\b|clone|fill|zero|catarray",
    "communication": r"nccl|gloo|all_?reduce",
}
ARITHMETIC = ("attention", "CTC", "convolutions", "matrix products")
Batched = TypeVar("Batched")


@dataclass(frozen=True)
class Measured:
    """What so many steps took, in seconds; kernels: seconds and calls of each by name."""

    steps: int
    wall: float
    waiting: float
    seconds: Counter[str]
    calls: Counter[str]
    is_gpu: bool


class Profile:
    """Watch the first steps that come by."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._seen, self._is_done = 0, False

    def over(self, batches: Iterator[Batched]) -> Iterator[Batched]:
        """Yield the batches of an epoch, and profile what happens between some, once in a run."""
        for batch in islice(batches, max(0, WARM_UP - self._seen)):
            self._seen += 1
            yield batch
        if self._seen == WARM_UP and not self._is_done:
            yield from self._watched(batches)
        yield from batches

    def close(self) -> None:
        """Say so where the run was too short."""
        if not self._is_done:
            log(f"note: profile: True needs more than {WARM_UP} steps; nothing was written.")

    def _watched(self, batches: Iterator[Batched]) -> Iterator[Batched]:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        waiting, steps = 0.0, 0
        with profile(activities=activities, acc_events=True) as profiler:
            began = asked = time.perf_counter()
            for batch in islice(batches, STEPS):
                waiting += time.perf_counter() - asked
                yield batch
                steps, asked = steps + 1, time.perf_counter()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            wall = time.perf_counter() - began
        if steps:
            self._is_done = True
            self._write(profiler, steps, wall, waiting)

    def _write(self, profiler: Any, steps: int, wall: float, waiting: float) -> None:
        seconds, calls = Counter[str](), Counter[str]()
        events = profiler.key_averages()
        is_gpu = any(event.device_type.name == "CUDA" for event in events)  # not without CUPTI
        for event in events:
            is_span = is_gpu and event.is_user_annotation  # as long as the kernels in it
            if is_gpu == (event.device_type.name == "CUDA") and not is_span:
                spent = event.self_device_time_total if is_gpu else event.self_cpu_time_total
                seconds[event.key] += spent / 1e6
                calls[event.key] += event.count
        verdict = judge(Measured(steps, wall, waiting, seconds, calls, is_gpu))
        write_text_atomically(self._folder / "profile.txt", verdict + "\n")
        trace = self._folder / "profile.json.gz"
        trace.unlink(missing_ok=True)  # it may be a link to another's file
        profiler.export_chrome_trace(str(trace))
        log(verdict)


def judge(measured: Measured) -> str:
    """Write ten lines: what bounds a step, its parts, and the kernels that take the most."""
    kinds = Counter[str]()
    for name, spent in measured.seconds.items():
        kinds[kind_of(name)] += spent
    busy = sum(kinds.values())
    arithmetic = sum(kinds[kind] for kind in ARITHMETIC) / busy
    step = 1000 * measured.wall / measured.steps
    place = "kernels of the GPU" if measured.is_gpu else "operations"
    lines = [
        f"profile of {measured.steps} steps: {_bound(measured, busy / measured.wall, arithmetic)}",
        f"a step takes {step:.1f} ms, of which {measured.waiting / measured.wall:.1%} waits for "
        f"data and {busy / measured.wall:.1%} is in {place}",
        "by kind: " + ", ".join(f"{kind} {part / busy:.0%}" for kind, part in kinds.most_common(5)),
        "the most of it:",
    ]
    for name, spent in measured.seconds.most_common(LISTED):
        milliseconds = 1000 * spent / measured.steps
        count = measured.calls[name] / measured.steps
        share = f"{spent / busy:6.1%} {milliseconds:8.2f} ms {count:6.0f} calls"
        lines.append(f"{share}  {name[:60]}")
    return "\n".join(lines)


def kind_of(name: str) -> str:
    """Name what an operation or a kernel does, by its own name."""
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "element-wise")


def _bound(measured: Measured, busy: float, arithmetic: float) -> str:
    if measured.waiting > 0.2 * measured.wall:
        return "data-bound: it waits for batches. Raise num_workers."
    if measured.is_gpu and busy < 0.7:
        return (
            "launch-bound: the GPU waits for the host. Raise batch_seconds, or try compile: True."
        )
    if arithmetic < 0.5:
        return "memory-bound: element-wise operations and copies take more than arithmetic does."
    return "compute-bound: arithmetic takes more than half of it."

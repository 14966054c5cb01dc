"""A profile says what a step is bound by."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbkit.train.profiling import STEPS, WARM_UP, Measured, Profile, judge, kind_of
from tests.train.test_speechbrain_ways import batches, brain_of

KERNELS = Counter({"aten::mm": 0.6, "aten::mul": 0.2, "aten::copy_": 0.1})
MEASURED = Measured(10, 1.0, 0.01, KERNELS, Counter(dict.fromkeys(KERNELS, 30)), is_gpu=False)


def count_up(last: int) -> Iterator[int]:
    yield from range(last)


@pytest.mark.parametrize("count", [3, WARM_UP, WARM_UP + 4, WARM_UP + STEPS + 5])
def test_every_batch_comes_once_and_in_order(count: int, tmp_path: Path) -> None:
    profile = Profile(tmp_path, torch.device("cpu"))
    seen = []
    for batch in profile.over(count_up(count)):
        seen.append(batch)
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert seen == list(range(count))
    watched = min(STEPS, max(0, count - WARM_UP))
    assert (tmp_path / "profile.txt").exists() == (watched > 0)
    if watched:
        verdict = (tmp_path / "profile.txt").read_text()
        assert verdict.startswith(f"profile of {watched} steps: ")
        assert len(verdict.splitlines()) <= 10
        assert "aten::mm" in verdict
        trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("aten::mm") == watched


def test_a_span_does_not_count_beside_the_kernels_in_it(tmp_path: Path) -> None:
    def event(key: str, microseconds: float, device: str, *, is_span: bool = False) -> Any:
        times = {"self_device_time_total": microseconds, "self_cpu_time_total": microseconds}
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(
            key=key, count=10, device_type=kind, is_user_annotation=is_span, **times
        )

    profiler = SimpleNamespace(
        key_averages=lambda: [
            event("aten::mm", 9e6, "CPU"),
            event("nvjet_tst", 6e5, "CUDA"),
            event("DistributedDataParallel.forward", 7e5, "CUDA", is_span=True),
        ],
        export_chrome_trace=lambda file: None,
    )
    Profile(tmp_path, torch.device("cuda"))._write(profiler, 10, 1.0, 0.0)
    lines = (tmp_path / "profile.txt").read_text().splitlines()
    assert lines[1].endswith("60.0% is in kernels of the GPU")
    assert lines[2] == "by kind: matrix products 100%"


def test_a_run_writes_it(tmp_path: Path) -> None:
    hparams = {"output_folder": str(tmp_path), "profile": True}
    brain_of(hparams=hparams).fit([1], batches(WARM_UP + 3))
    assert (tmp_path / "profile.txt").read_text().startswith("profile of 3 steps: ")


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (MEASURED, "compute-bound"),
        (replace(MEASURED, waiting=0.3), "data-bound"),
        (replace(MEASURED, is_gpu=True, wall=2.0), "launch-bound"),
        (replace(MEASURED, seconds=KERNELS + Counter({"aten::silu": 0.6})), "memory-bound"),
    ],
)
def test_what_a_step_is_bound_by(measured: Measured, verdict: str) -> None:
    lines = judge(measured).splitlines()
    assert lines[0].startswith(f"profile of 10 steps: {verdict}: ")
    assert "ms, of which" in lines[1]
    figures = next(line.split() for line in lines[4:] if line.endswith("aten::mm"))
    assert figures[1:] == ["60.00", "ms", "3", "calls", "aten::mm"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("aten::mul", "element-wise"),
    ],
)
def test_what_a_kernel_does_is_told_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind

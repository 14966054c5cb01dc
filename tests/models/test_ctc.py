"""The kernel for GPUs is PyTorch's in everything but the waiting and the order of its sums."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sbkit.models import loss
from sbkit.models.loss import TOLERANCE, compare, ctc_of_torch, kernel_of
from tests.models.interpreted_ctc import CASES

ROOT = Path(__file__).parents[2]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLOATS = ("log_probs", "alphas", "likelihoods", "scales", "gradient")
SIZES = ("blank", "longest", "size", "width")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernel answers when Triton interprets it on the CPU."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.interpreted_ctc"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_torch(case: str, interpreted: dict[str, Any]) -> None:
    assert interpreted[case] == pytest.approx([0, 0], abs=1e-4)


def test_what_is_no_number_is_not_hidden(interpreted: dict[str, Any]) -> None:
    assert interpreted["nan"]


def test_the_question_asked_of_a_gpu_is_answered_alike(interpreted: dict[str, Any]) -> None:
    assert interpreted["compare"] < TOLERANCE / 10


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_it_compiles_for_gpus_that_are_not_here(capability: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sbkit.models import ctc_triton

    for function in (ctc_triton._ctc_forward, ctc_triton._ctc_backward):
        types = {name: "*fp32" if name in FLOATS else "*i64" for name in function.arg_names}
        types |= dict.fromkeys(SIZES, "i32") | {"states": "constexpr"}
        source = ASTSource(function, types, {"states": 512})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]


def test_the_cpu_keeps_the_kernel_of_torch() -> None:
    assert kernel_of(torch.device("cpu")) is ctc_of_torch


@pytest.mark.parametrize(("factor", "says"), [(1.01, "off by"), (None, "RuntimeError: no driver")])
def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used(
    factor: float | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*inputs: Tensor, blank: int) -> Tensor:
        if factor is None:
            raise RuntimeError("no driver")
        return ctc_of_torch(*inputs, blank=blank) * factor

    def compare_here(one: loss.Kernel, other: loss.Kernel, device: torch.device) -> float:
        return compare(one, other, torch.device("cpu"))

    kernel = pytest.importorskip("sbkit.models.ctc_triton")
    monkeypatch.setattr(kernel, "ctc_on_gpu", broken)
    monkeypatch.setattr(loss, "compare", compare_here)
    with torch.no_grad():  # as in a run that only evaluates
        assert kernel_of.__wrapped__(torch.device("cuda")) is ctc_of_torch
    assert says in capsys.readouterr().out


def test_a_kernel_that_is_right_is_used_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their times a rank, or a run that goes on, took another one than the rest."""
    own = partial(ctc_of_torch)
    kernels = pytest.importorskip("sbkit.models.ctc_triton")
    monkeypatch.setattr(kernels, "ctc_on_gpu", own)
    monkeypatch.setattr(loss, "compare", lambda one, other, device: 0.0)
    assert kernel_of.__wrapped__(torch.device("cuda")) is own
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_takes_it_without_a_wait_and_gives_the_same_twice() -> None:
    from sbkit.models.ctc_triton import ctc_on_gpu as kernel

    scores = torch.randn(16, 300, 40, device="cuda", requires_grad=True)
    tokens = torch.randint(1, 40, (16, 90), device="cuda")
    frames, counts = torch.randint(200, 301, (16,)), torch.randint(1, 91, (16,))
    gradients = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            losses = kernel(scores.log_softmax(-1), tokens, frames, counts, blank=0)
            gradients += torch.autograd.grad(losses.sum(), scores)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gradients[0].equal(gradients[1]) and gradients[0].equal(gradients[2])

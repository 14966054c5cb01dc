"""Tests that need a GPU; `python -m tools.bench_gpu` runs them.

The data is generated noise, so that nothing is downloaded.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.asr.brain import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from sbkit.bundle.bundle import read_bundle
from sbkit.data.batch import Batch
from sbkit.distributed.device import resolve_placement
from sbkit.models import loss
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import Compilation, CompiledModel, TorchModel
from tests.runs import ROOT, Workplace, losses_of, read_json, stopped_after
from tests.runtime.bundles import make_bundle
from tools.bench_gpu import make_release

STEPS = 10
DEVICE = "cuda"
OPTIONS = (
    *(f"--device={DEVICE}", "--check=false", "--number_of_epochs=2", "--log_every=1000"),
    *("--batch_seconds=12", "--min_seconds=0", "--num_workers=2"),
)
RELATIVE_TOLERANCE = 1e-3  # sums on a GPU have no fixed order, and products are in TF32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("gpu")
    release = make_release(folder / "release", {"train": 4, "dev": 2, "test": 2})
    return Workplace(release, folder / "cache")


@pytest.fixture(scope="module")
def reference(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference")
    assert workplace.train_here(run, *OPTIONS) == 0
    return run


def test_run_is_on_the_gpu_and_its_summary_names_it(reference: Path) -> None:
    summary = read_json(reference / "summary.json")
    assert summary["machine"]["accelerator"] == torch.cuda.get_device_name()
    assert len(losses_of(reference)) >= 4 and all(np.isfinite(losses_of(reference)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_ten_steps_without_a_synchronization(
    precision: str, workplace: Workplace, tmp_path: Path
) -> None:
    """Except in PyTorch's CTC, which copies the lengths to the GPU, forward and backward."""
    fit_batch, ctc_loss, steps = AsrBrain.fit_batch, loss.ctc_loss, list[int]()

    def set_mode(_: object = None, *, strict: bool = True) -> None:
        # The first steps build kernels and the state of the scaler and the optimizer.
        strict &= 3 < len(steps) <= 3 + STEPS
        torch.cuda.set_sync_debug_mode("error" if strict else "default")

    def ctc_loss_that_waits(log_probs: Tensor, *lengths: Any, **options: Any) -> Tensor:
        set_mode(strict=False)
        per_utterance: Tensor = ctc_loss(log_probs, *lengths, **options)
        if not log_probs.requires_grad:  # in validation
            return per_utterance
        per_utterance.register_hook(partial(set_mode, strict=False))
        log_probs.register_hook(set_mode)  # after the backward pass of CTC
        set_mode()
        return per_utterance

    def fit_batch_strictly(brain: AsrBrain, batch: Batch) -> Any:
        steps.append(1)
        set_mode()
        try:
            return fit_batch(brain, batch)
        finally:
            set_mode(strict=False)

    with (
        patch.object(AsrBrain, "fit_batch", fit_batch_strictly),
        patch.object(loss, "ctc_loss", ctc_loss_that_waits),
    ):
        options = (f"--precision={precision}", f"--eval_precision={precision}")
        assert workplace.train_here(tmp_path, *OPTIONS, *options) == 0
    assert len(steps) > 3 + STEPS


def test_run_stopped_within_an_epoch_resumes(
    reference: Path, workplace: Workplace, tmp_path: Path
) -> None:
    with stopped_after(4):
        assert workplace.train_here(tmp_path, *OPTIONS) == ASKED_TO_STOP
    assert workplace.train_here(tmp_path, *OPTIONS) == 0
    assert losses_of(tmp_path) == pytest.approx(losses_of(reference), rel=RELATIVE_TOLERANCE)


def test_batch_that_does_not_fit_into_memory_ends_the_run_with_advice(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*OPTIONS, "--batch_seconds=200")
    torch.cuda.set_per_process_memory_fraction(3e-4)
    try:
        assert workplace.train_here(tmp_path, *options) == BAD_INPUT
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "`batch_seconds`" in capsys.readouterr().err


def test_run_is_checked(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--check=true", "--number_of_epochs=3")
    assert workplace.train_here(tmp_path, *OPTIONS, *options) == 0


def test_torchrun_with_nccl_ends(workplace: Workplace, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    process = subprocess.run(
        [sys.executable, *launcher, "train.py", *workplace.arguments(tmp_path, *OPTIONS)],
        cwd=ROOT,
        env={**os.environ, "SBKIT_CACHE": str(workplace.cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("precision", "mode", "atol"),
    [
        ("fp32", None, 1e-2),
        ("bf16", None, 0.3),
        ("fp16", None, 0.1),
        ("fp32", "default", 1e-2),
        ("fp32", "reduce-overhead", 1e-2),
    ],
)
def test_bundle_has_the_log_probabilities_of_the_cpu(
    precision: str, mode: str | None, atol: float, tmp_path: Path
) -> None:
    bundle = make_bundle(tmp_path, num_encoder_layers=3)
    contents, random = read_bundle(bundle, with_weights=True), np.random.default_rng(0)
    clips = [random.integers(-9000, 9000, n).astype(np.int16) for n in (9000, 16_000, 12_345)]
    shape: dict[str, Any] = {"clips": (1,), "seconds": (1.0,)}
    placement = resolve_placement(DEVICE, precision)
    options = {} if mode is None else {"compilation": Compilation(mode=mode, **shape)}
    load = TorchModel.load if mode is None else CompiledModel.load
    make = partial(load, contents, bundle, placement=placement, **options)
    gpu_model, cpu_model = ModelThread(make), load_bundle(bundle).model
    assert gpu_model.runs_on.device == str(placement.device)
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda n: gpu_model.encode([clips[n % 3]])[0], range(24)))
    for number, output in enumerate(outputs):
        (expected,) = cpu_model.encode([clips[number % 3]])
        np.testing.assert_allclose(output.log_probs, expected.log_probs, atol=atol)
        tokens = np.ones((2, number % 5 + 1), np.int64)  # states outlive later calls of `encode`
        scores = gpu_model.score_texts(output.states, tokens)
        expected_scores = cpu_model.score_texts(expected.states, tokens)
        np.testing.assert_allclose(scores, expected_scores, atol=atol * tokens.shape[1])
    gpu_model.close()


def test_compiled_run_has_the_same_losses(
    reference: Path, workplace: Workplace, tmp_path: Path
) -> None:
    assert workplace.train_here(tmp_path, *OPTIONS, "--compile=True") == 0
    assert losses_of(tmp_path) == pytest.approx(losses_of(reference), rel=RELATIVE_TOLERANCE)

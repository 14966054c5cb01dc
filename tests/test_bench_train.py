"""sbkit and SpeechBrain train side by side, on one corpus, with models of one size."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import soundfile
import torch

from sbkit.config.hparams import load_hparams
from sbkit.config.overrides import parse_command
from sbkit.text.tokenizer import ensure_tokenizer
from tests.runs import ROOT, Workplace
from tools import bench_train
from tools.bench import take_turns
from tools.bench_gpu import (
    CLIP_SECONDS,
    CONFORMER,
    COPIES,
    GPU_TESTS,
    TimedCommand,
    make_parts,
    make_release,
    run,
)
from tools.bench_sides import SbkitSide, make_side
from tools.bench_train import SIDES

SMALL = ("--d_model=16", "--nhead=2", "--d_ffn=256", "--cnn_channels=64", "--token_type=char")
FIGURES = ("rtfx", "update", "padding", "waiting", "memory", "tflops")
SMALL += ("--vocab_size=null", "--num_encoder_layers=1", "--num_decoder_layers=1")


@pytest.fixture
def data_folder(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the option for a small release, and use its cache."""
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    return f"--data_folder={workplace.release}"


@pytest.mark.slow(30)
def test_bench_train_runs_both_sides_in_turns(
    data_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of SpeechBrain's two sides is left out; they differ in an environment variable."""
    names = ("sbkit", "speechbrain passive")
    monkeypatch.setattr(bench_train, "SIDES", {name: SIDES[name] for name in names})
    monkeypatch.setattr(
        sys, "argv", ["bench_train", "--rounds=2", "--seconds=0.3", data_folder, *SMALL]
    )
    bench_train.main()
    output = capsys.readouterr().out
    sizes = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) parameters", output)]
    assert len(sizes) == 2
    assert max(sizes) / min(sizes) < 1.01
    header, _, *rows = [line.strip("| ").split(" | ") for line in output.splitlines()[2:]]
    assert header == [*FIGURES, "beside speechbrain passive"]
    turns = [f"{name}, round {number}" for number in (1, 2) for name in names]
    assert [row[0] for row in rows] == [*turns, *(f"{name}, median" for name in names)]
    assert rows[-1][-1] == "1" and all(float(row[-2]) > 0 for row in rows)


def test_bench_train_uses_learning_rates_of_run(data_folder: str, tmp_path: Path) -> None:
    options = [*SMALL, data_folder, "--number_of_epochs=2", "--warmup_fraction=0.5"]
    side = make_side(SbkitSide, ROOT / "hparams" / "ctc.yaml", options, tmp_path)
    rates = []
    for epoch in (1, 2):
        for _ in range(len(side.brain.loaders.train)):
            side.step(next(side.batches))
            rates.append(side.brain.optimizer.param_groups[0]["lr"])
        assert side.brain.hparams.epoch_counter.current == epoch
    assert rates[0] == 0 and max(rates) == rates[len(rates) // 2] == 0.0025


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "cpu"])
def test_bench_train_relates_speed_to_the_peak_of_the_gpu(gpu: str) -> None:
    figures = bench_train.with_peak_share({"tflops": 31.2}, gpu)
    assert figures.get("mfu") == (None if gpu == "cpu" else pytest.approx(0.1))


def test_ratios_are_of_medians_after_a_round_that_warms_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds = {"ours": iter([1.0, 3000.0, 5000.0, 2.0]), "theirs": iter([9.0, 1.0, 2.0, 3.0])}
    sides = {name: partial(lambda left: {"speed": next(left)}, speeds[name]) for name in speeds}
    take_turns(sides, 3, "theirs")
    *_, ours, theirs = capsys.readouterr().out.splitlines()
    assert ours == "| ours, median | 3,000 | 1,500 |"
    assert theirs == "| theirs, median | 2 | 1 |"


def test_bench_gpu_models_have_declared_sizes(tmp_path: Path) -> None:
    release = make_release(tmp_path / "release", {"train": 3, "dev": 1})
    rows = (release / "train.tsv").read_text().splitlines()[1:]
    assert len(rows) == 3 * COPIES
    for file in (release / "clips").iterdir():
        assert CLIP_SECONDS[0] <= soundfile.info(file).duration <= CLIP_SECONDS[1]
    texts = [row.partition("\t")[2] for row in rows]
    ensure_tokenizer(
        model_file=tmp_path / "tokenizer.model", kind="char", vocab_size=None, texts=lambda: texts
    )
    _, overrides = parse_command(["x.yaml", *CONFORMER, f"--output_folder={tmp_path}"])
    with torch.device("meta"):
        model = load_hparams(ROOT / "hparams" / "ctc.yaml", overrides)["model"]
    assert 29e6 < sum(value.numel() for value in model.parameters()) < 31e6


def test_bench_gpu_reports_failed_and_hanging_parts_and_continues() -> None:
    python = (sys.executable, "-c")
    failed = run(TimedCommand("a test", (*python, "print('seen'); raise SystemExit(3)"), 60))
    assert failed.startswith("a test (exit code 3, ") and failed.endswith("seen")
    hung = (*python, "import time; print('begun', flush=True); time.sleep(60)")
    assert run(TimedCommand("another", hung, 1)).startswith("another (exit code -9, ")
    large = make_parts(["--data_folder=x", "--seconds=8"])[1]
    assert list(large.command[-3:]) == ["--yaml", "hparams/ctc_large.yaml", "--precision=bf16"]
    seconds = sum(part.max_seconds for part in make_parts([]))
    assert seconds < 570  # the release takes another 20


def test_bench_gpu_runs_all_gpu_tests() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text() and file.name != Path(__file__).name
    }
    assert marked == {*GPU_TESTS}

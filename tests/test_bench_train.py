"""sbkit and SpeechBrain train side by side, on one corpus, with models of one size."""

import json
import re
import sys
from functools import partial

import pytest

from tests.runs import ROOT, Workplace
from tools import bench_train
from tools.bench import take_turns
from tools.bench_gpu import GPU_TESTS, MAX_SECONDS, make_parts
from tools.bench_sides import with_peak_share
from tools.bench_train import SIDES

SMALL = (
    *("--d_model=16", "--nhead=2", "--d_ffn=256", "--cnn_channels=64", "--token_type=char"),
    *("--vocab_size=null", "--num_encoder_layers=1", "--num_decoder_layers=1"),
)
FIGURES = ("rtfx", "update", "padding", "waiting", "memory", "tflops")


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
    words = ["bench_train", "--rounds=2", "--seconds=0.3", data_folder, *SMALL]
    monkeypatch.setattr(sys, "argv", words)
    bench_train.main()
    output = capsys.readouterr().out
    sizes = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) parameters", output)]
    assert len(sizes) == 2
    assert max(sizes) / min(sizes) < 1.01
    *rounds, header, _, ours, theirs = output.splitlines()[2:]
    assert header == f"| | {' | '.join(FIGURES)} | beside speechbrain passive |"
    assert [json.loads(line)["side"] for line in rounds] == [*names, *names]
    assert all(json.loads(line)["tflops"] > 0 for line in rounds)
    assert ours.startswith("| sbkit | ") and theirs.endswith(" | 1 |")


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "cpu"])
def test_bench_train_relates_speed_to_the_peak_of_the_gpu(gpu: str) -> None:
    figures = with_peak_share({"tflops": 31.2}, gpu)
    assert figures.get("mfu") == (None if gpu == "cpu" else pytest.approx(0.1))


def test_ratios_are_of_medians_after_a_round_that_warms_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds = {"ours": iter([1.0, 3000.0, 5000.0, 2.0]), "theirs": iter([9.0, 1.0, 2.0, 3.0])}
    sides = {name: partial(lambda left: {"speed": next(left)}, speeds[name]) for name in speeds}
    take_turns(sides, 3, "theirs")
    *_, ours, theirs = capsys.readouterr().out.splitlines()
    assert ours == "| ours | 3,000 | 1,500 |"
    assert theirs == "| theirs | 2 | 1 |"


def test_bench_gpu_fits_into_one_call() -> None:
    parts = make_parts([])
    assert sum(part.max_seconds or 0 for part in parts) < MAX_SECONDS - 100
    assert all((ROOT / file).is_file() for file in GPU_TESTS)

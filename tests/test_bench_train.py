"""sbkit and SpeechBrain train side by side, on one corpus, with models of one size."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from sbkit.config.hparams import load_hparams
from sbkit.config.overrides import parse_command
from sbkit.models.pretrained.parts import PretrainedEncoder
from sbkit.text.tokenizer import ensure_tokenizer
from sbkit.train.initialize import with_encoder_config
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.runs import ROOT, Workplace
from tools import bench_train
from tools.bench_gpu import (
    CLIP_SECONDS,
    CONFORMER,
    COPIES,
    GPU_TESTS,
    TimedCommand,
    default_parts,
    fine_tuning_parts,
    make_release,
    run,
)
from tools.bench_sides import SbkitSide, make_side
from tools.bench_train import SIDES

SMALL = ("--d_model=16", "--nhead=2", "--d_ffn=256", "--cnn_channels=64", "--token_type=char")
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
    options = ("--rounds=2", "--seconds=0.3", "--to-cer=9", data_folder)
    monkeypatch.setattr(sys, "argv", ["bench_train", *options, *SMALL])
    bench_train.main()
    output = capsys.readouterr().out
    sizes = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) parameters", output)]
    assert len(sizes) == 2
    assert max(sizes) / min(sizes) < 1.01
    for side in names:
        assert len(re.findall(rf"round \d {side}: [\d.]+ RTFx", output)) == 2
    header, first, *_ = output.partition("rtfx      update     padding")[2].splitlines()
    assert header.split() == ["waiting", "memory", "tflops"]
    assert float(first.split()[-1]) > 0
    assert re.search(r"sbkit to the best of the others: \d+\.\d\d", output)
    assert re.search(r"to dev CER 9.0: \d+\.\d times as fast", output)


@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("family", "sizes"), [("wav2vec2", FRAMES), ("whisper", {"max_source_positions": 1500})]
)
def test_bench_train_fine_tunes_all_sides_in_turns(
    family: str,
    sizes: dict[str, Any],
    data_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_folder(tmp_path / "base", family, **sizes)
    options = ("--rounds=1", "--seconds=0.3", "--to-cer=9", data_folder)
    model = ("--yaml", "hparams/ctc_pretrained.yaml", f"--pretrained={folder}", "--batch_seconds=6")
    monkeypatch.setattr(sys, "argv", ["bench_train", *options, *model])
    bench_train.main()
    output = capsys.readouterr().out
    for side in ("sbkit", "speechbrain", "huggingface"):
        assert re.search(rf"round 1 {side}: [\d.]+ RTFx", output)
    assert re.search(r"sbkit to the best of the others: \d+\.\d\d", output)
    assert re.search(r"to dev CER 9.0: \d+\.\d times as fast", output)


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


class FakeSide:
    """A side without a process, whose dev CER never falls."""

    def __init__(self, name: str, gpu: str, rtfx: float) -> None:
        self.name, self.facts = name, {"name": gpu}
        self.rounds = [{"seconds": 10.0, "rtfx": rtfx, "tflops": 31.2}]

    def median(self, figure: str) -> float:
        return self.rounds[0][figure]

    def ask(self, **question: float) -> dict[str, float]:
        return {"seconds": 10.0, "cer": 0.4 if self.name == "sbkit" else 1.0}


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "cpu"])
def test_bench_train_relates_speeds_to_the_gpu_and_to_each_other(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sides: Any = [FakeSide("sbkit", gpu, 90.0), FakeSide("speechbrain", gpu, 40.0)]
    header, first, *_, ratio = bench_train.table(sides).splitlines()
    mfu = dict(zip(header.split(), first.split()[1:], strict=True)).get("mfu")
    assert mfu == (None if gpu == "cpu" else "0.1")
    assert ratio == "sbkit to the best of the others: 2.25"
    bench_train.race(sides, 0.5, 10.0)
    assert capsys.readouterr().out.endswith("to dev CER 0.5: more than 6.0 times as fast\n")


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


def test_bench_gpu_fine_tunes_large_encoder_in_all_ways(tmp_path: Path) -> None:
    for part in fine_tuning_parts([]):
        yaml, overrides = parse_command(part.command[part.command.index("--yaml") + 1 :])
        knobs = with_encoder_config(ROOT / yaml, {**overrides, "output_folder": str(tmp_path)})
        with torch.device("meta"):
            encoder = PretrainedEncoder(config=knobs["encoder_config"], lora=knobs.get("lora"))
        assert 305e6 < sum(value.numel() for value in encoder.parameters()) < 315e6
    assert knobs["lora"] and knobs["precision"] == "bf16"


def test_bench_gpu_reports_failed_and_hanging_parts_and_continues() -> None:
    python = (sys.executable, "-c")
    failed = run(TimedCommand("a test", (*python, "print('seen'); raise SystemExit(3)"), 60))
    assert failed.startswith("a test (exit code 3, ") and failed.endswith("seen")
    hung = (*python, "import time; print('begun', flush=True); time.sleep(60)")
    assert run(TimedCommand("another", hung, 1)).startswith("another (exit code -9, ")
    large = default_parts(["--data_folder=x", "--seconds=8"])[1]
    assert list(large.command[-3:]) == ["--yaml", "hparams/ctc_large.yaml", "--precision=bf16"]
    for parts in (default_parts([]), fine_tuning_parts([])):
        assert sum(part.max_seconds for part in parts) < 570  # the release takes another 20


def test_bench_gpu_runs_all_gpu_tests() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text() and file.name != Path(__file__).name
    }
    assert marked == {*GPU_TESTS}

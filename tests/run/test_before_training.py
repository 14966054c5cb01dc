"""A run that starts from a recognizer measures it first, and says so wherever it says results."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import to_json
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.run_results import BEFORE_TRAINING
from sbkit.logs.metric import percent
from sbkit.run.before_training import describe_worse
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.task import AsrTask
from tests.models.pretrained.folders import make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import Workplace, read_json, stopped_after

pytestmark = pytest.mark.slow

ONE_EPOCH: tuple[str, ...] = ("--check=False", "--number_of_epochs=1", "--average_checkpoints=1")
PRETRAINED: tuple[str, ...] = ("--device=cpu", *ONE_EPOCH, "--batch_seconds=6")
PRETRAINED += ("--word_lm_order=0", "--token_lm_order=0")


def test_start_from_a_bundle_is_measured_once(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    assert workplace.train_here(first, *ONE_EPOCH) == 0
    assert "before training" not in capsys.readouterr().out
    assert "before_training" not in read_json(first / "summary.json")
    start = ("--init_from_differs=[text]", "--text={case: keep}", "--lr=0.1")
    options = (f"--init_from={first}", *start, *ONE_EPOCH)
    run.mkdir()
    (run / BEFORE_TRAINING).write_text("of a try with another start")
    with stopped_after(1):
        workplace.train_here(run, *options)
    before = read_json(run / BEFORE_TRAINING)
    assert before.keys() == {"dev", "test"}
    output = capsys.readouterr().out
    first.rename(tmp_path / "gone")
    assert workplace.train_here(run, *options) == 0
    captured = capsys.readouterr()
    output += captured.out
    assert output.count("before training: dev: CER") == 1
    assert output.count("before training: test: CER") == 1

    summary = read_json(run / "summary.json")
    assert summary["before_training"] == before == read_json(run / BEFORE_TRAINING)
    assert before["test"]["utterances"] == summary["test"]["test"]["utterances"]
    assert before["test"]["references"] == summary["test"]["test"]["references"]
    assert "before training: test: CER" in (run / "report.html").read_text()
    assert summary["test"]["test"]["CER"] > before["test"]["CER"]  # the learning rate is too high
    assert "test: the run ends worse than it began: CER" in captured.err
    assert sbkit(["compare", str(run), str(tmp_path / "gone")]) == 0
    wer, cer = (percent(before["test"][rate]) for rate in ("WER", "CER"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "before" in line]
    assert lines == [f"  A: before training: WER {wer}, CER {cer}"]


def test_run_ends_with_a_better_bundle_that_it_started_from(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    assert workplace.train_here(first, *ONE_EPOCH) == 0
    capsys.readouterr()
    weights: dict[str, bytes] = {}
    for option in ("--keep_better_start=True", "--keep_better_start=False", "--nhead=4"):
        run, keeps = tmp_path / option, option.endswith("True")
        start = (f"--init_from={first}", "--lr=0.1", option)
        assert workplace.train_here(run, *start, *ONE_EPOCH) == 0  # the learning rate is too high
        summary, captured = read_json(run / "summary.json"), capsys.readouterr()
        before, after = summary["before_training"]["test"], summary["test"]["test"]
        assert summary["ends_with_start"] == keeps == (before["CER"] == after["CER"])
        assert keeps == (before["greedy"] == after["greedy"])
        assert ("the run ends with the weights that it started from" in captured.err) == keeps
        assert ("the weights before training" in captured.out) == keeps
        assert ("the run ends worse than it began" in captured.err) != keeps
        weights[option] = (run / "bundle" / WEIGHTS_FILE).read_bytes()
    kept, *trained = weights.values()
    assert kept == (first / "bundle" / WEIGHTS_FILE).read_bytes()
    assert kept not in trained


def test_run_ends_with_a_better_whisper_that_it_started_from(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder, out = tmp_path / "run", tmp_path / "whisper", tmp_path / "out"
    make_whisper(folder, seconds=30, max_tokens=120)
    yaml = {"yaml": "hparams/whisper.yaml", "tiny": PRETRAINED}
    with stopped_after(1):
        workplace.train_here(run, f"--pretrained={folder}", **yaml)
    scores = read_json(run / BEFORE_TRAINING)
    scores["dev"]["CER"] = -1.0  # whatever training reaches is worse
    (run / BEFORE_TRAINING).write_text(to_json(scores))
    assert workplace.train_here(run, f"--pretrained={folder}", **yaml) == 0
    assert "the run ends with the weights that it started from" in capsys.readouterr().err
    summary = read_json(run / "summary.json")
    assert summary["ends_with_start"]
    assert summary["test"]["test"]["CER"] == summary["before_training"]["test"]["CER"]

    clips = [np.random.default_rng(0).normal(0, 1000, 16_000).astype(np.int16)]
    expected = load_bundle(folder, language="en").transcribe(clips)
    shutil.rmtree(folder)
    assert sbkit(["export", str(run), f"--out={out}"]) == 0
    assert load_bundle(out).transcribe(clips) == expected
    with pytest.raises(ConfigError, match="The runtime onnx is not supported for models of trans"):
        load_bundle(out, runtime="onnx")
    (out / "huggingface/config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"damaged: config.json is not what was written"):
        load_bundle(out)


def test_pretrained_whisper_is_measured_with_its_decoder(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whisper = tmp_path / "run", tmp_path / "whisper"
    make_whisper(whisper, seconds=30)
    yaml = {"yaml": "hparams/ctc_whisper.yaml", "tiny": PRETRAINED}
    assert workplace.train_here(run, f"--pretrained={whisper}", **yaml) == 0
    before = read_json(run / "summary.json")["before_training"]
    table = workplace.release / "test.tsv"
    capsys.readouterr()
    assert sbkit(["score", str(whisper), str(table), "--language=en", f"--out={run}/s"]) == 0
    score = read_json(run / "s/summary.json")["test"]["test"]
    assert before["test"]["CER"] == score["CER"]


def test_encoder_is_not_measured(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "encoder", "whisper", max_source_positions=1500)
    yaml = {"yaml": "hparams/ctc_whisper.yaml", "tiny": PRETRAINED}
    assert workplace.train_here(tmp_path / "run", f"--pretrained={folder}", **yaml) == 0
    assert "before training" not in capsys.readouterr().out
    assert not (tmp_path / "run" / BEFORE_TRAINING).exists()


def test_worse_sets_are_named_with_their_intervals() -> None:
    interval: dict[str, object] = {"low": 0.1, "high": 0.3, "unit": "clips", "unit_count": 20}
    before, after = (
        {"test": {"CER": cer, "CER_interval": interval}, "noise": {"CER": 0.5}}
        for cer in (0.18, 0.2)
    )
    (line,) = describe_worse(AsrTask.metrics, before, {**after, "other": after["test"]})
    assert line == (
        "test: the run ends worse than it began: CER 20.0 % (10.0 to 30.0), before training "
        "18.0 % (10.0 to 30.0)."
    )
    assert not [*describe_worse(AsrTask.metrics, after, before)]

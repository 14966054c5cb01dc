"""A run that starts from a recognizer measures it first, and says so wherever it says results."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sbkit.base.checksums import write_checksums
from sbkit.base.files import TEMPORARY_NAMES, to_json
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.intervals import Interval
from sbkit.evaluate.run_results import BEFORE_TRAINING, ends_with_start
from sbkit.evaluate.wer import ErrorCounts, TextErrors
from sbkit.evaluate.wer_report import TextFigures
from sbkit.logs.metric import percent
from sbkit.run import before_training, export_and_test
from sbkit.run.before_training import describe_worse, find_start
from sbkit.run.export_and_test import START_BUNDLE, keep_better_start
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.task import AsrTask
from tests.models.pretrained.folders import make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import Workplace, last_parameters, read_json, stopped_after

ONE_EPOCH: tuple[str, ...] = ("--check=False", "--number_of_epochs=1", "--average_checkpoints=1")
PRETRAINED: tuple[str, ...] = ("--device=cpu", *ONE_EPOCH, "--batch_seconds=6")
PRETRAINED += ("--word_lm_order=0", "--token_lm_order=0")
LORA = ("--lora={rank: 2, alpha: 4, projections: [q_proj]}",)


@pytest.mark.slow
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


@pytest.mark.slow
def test_run_ends_with_the_better_weights_that_it_started_from(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has its own decoder: once with language models that its start lacks, once without."""
    first = tmp_path / "first"
    assert workplace.train_here(first, *ONE_EPOCH) == 0
    capsys.readouterr()
    lms, no_lms = (tuple(f"--{kind}_lm_order={n}" for kind in ("word", "token")) for n in (2, 0))
    kept, again, trained, other = (
        tmp_path / name for name in ("kept", "again", "trained", "other")
    )
    for run, start, options in (
        (kept, first, (*lms, "--beam_size=7")),
        (again, kept, no_lms),
        (trained, first, ("--keep_better_start=False",)),
        (other, first, ("--d_ffn=96",)),  # some of its weights are new
    ):
        ends = run in (kept, again)
        much_too_high = ("--lr=5", f"--init_from={start}")
        assert workplace.train_here(run, *much_too_high, *options, *ONE_EPOCH) == 0
        summary, captured = read_json(run / "summary.json"), capsys.readouterr()
        before, after = summary["before_training"]["test"], summary["test"]["test"]
        assert summary["ends_with_start"] == ends == (before["greedy"] == after["greedy"])
        assert ("the run ends with the weights that it started from" in captured.err) == ends
        assert ("the weights before training" in captured.out) == ends
        assert ends or "the run ends worse than it began" in captured.err
        assert not [*run.glob(TEMPORARY_NAMES)]
        weights, initial = (load_file(r / "bundle" / WEIGHTS_FILE) for r in (run, first))
        same = [torch.equal(weights[name], initial[name]) for name in weights if "ffn" not in name]
        assert all(same) == ends
        bundle = load_bundle(run)
        assert (bundle.word_lm is not None) == (run is kept)
        assert summary["provenance"] == {**bundle.digests, "decoder": bundle.decoder.plain()}
        assert sbkit(["export", str(run), f"--out={tmp_path / 'card'}"]) == 0
        card = (tmp_path / "card/README.md").read_text()
        note = f"- weights: those of {start.name}, which this run did not train"
        assert (note in card) == ends
    assert load_bundle(kept).decoder.beam_size == 7


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_end_with_the_weights_that_they_started_from(
    workplace: Workplace, tmp_path: Path
) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    assert workplace.train_here(first, *ONE_EPOCH) == 0
    options = (f"--init_from={first}", "--lr=5", *ONE_EPOCH)
    process = workplace.train_forked(run, *options, ranks=2)
    assert process.returncode == 0, process.stderr
    assert read_json(run / "summary.json")["ends_with_start"]
    assert {path.name for path in run.glob("bundle*")} == {"bundle"}
    assert not [*run.glob(TEMPORARY_NAMES)]


def test_start_with_a_declared_difference_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_and_test, "find_start", lambda run: {"folder": tmp_path})
    (tmp_path / BEFORE_TRAINING).write_text('{"dev": {"CER": 0}}')
    settings = {"keep_better_start": True, "init_from_differs": ["text"]}
    run: Any = SimpleNamespace(spec=SimpleNamespace(folder=tmp_path, settings=settings))
    bundle: Any = SimpleNamespace()
    assert keep_better_start(run, SimpleNamespace(), bundle) is bundle


FIGURES: dict[str, tuple[float, float]] = {"better": (0.1, 0.2), "equal": (0.2, 0.2)}


@pytest.mark.parametrize("start", FIGURES)
def test_only_a_better_start_is_kept(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / BEFORE_TRAINING).write_text('{"dev": {"CER": 0}}')  # by another decoder
    trained: Any = SimpleNamespace(task=AsrTask())
    bundles = {"bundle": trained, START_BUNDLE: "start"}
    for name, replacement in {
        "_load_start": lambda run, bundle: SimpleNamespace(hparams={"model": nn.Linear(1, 1)}),
        "make_brain": lambda run: SimpleNamespace(),
        "_open_or_make": lambda run, brain, folder, collect: make(folder),
        "score_splits": lambda run, brain, bundle, sets: SimpleNamespace(
            entries={"dev": {"CER": FIGURES[start][bundle is trained]}}
        ),
    }.items():
        monkeypatch.setattr(export_and_test, name, replacement)

    def make(folder: Path) -> Any:
        if not folder.exists():
            folder.mkdir()
            checkpoints = [] if folder.name == START_BUNDLE else [{"epoch": 1}]
            (folder / CONFIG_FILE).write_text(to_json({"checkpoints": checkpoints}))
            write_checksums(folder)
        return bundles[folder.name]

    make(tmp_path / "bundle")
    settings = {"keep_better_start": True}
    spec = SimpleNamespace(folder=tmp_path, settings=settings)
    splits = SimpleNamespace(valid={"dev": ()})
    run: Any = SimpleNamespace(spec=spec, loaders=SimpleNamespace(splits=splits))
    brain: Any = SimpleNamespace(stopping=None, watchdog=None)
    assert keep_better_start(run, brain, trained) is trained
    assert ends_with_start(tmp_path) == (start == "better")
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", BEFORE_TRAINING}


@pytest.mark.slow
def test_run_ends_with_the_better_weights_of_whisper(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whisper has no CTC head, so that of the bundle is the trained one."""
    run, folder = tmp_path / "run", tmp_path / "whisper"
    make_whisper(folder, seconds=30, max_tokens=120)
    figures = iter((0.1, 0.2))  # first of the start

    def scores(*_: object) -> Any:
        return SimpleNamespace(entries={"dev": {"CER": next(figures)}})

    monkeypatch.setattr(export_and_test, "score_splits", scores)
    yaml = {"yaml": "hparams/whisper.yaml", "tiny": PRETRAINED}
    assert workplace.train_here(run, f"--pretrained={folder}", *LORA, **yaml) == 0
    assert read_json(run / "summary.json")["ends_with_start"]
    weights, trained = load_file(run / "bundle" / WEIGHTS_FILE), last_parameters(run)
    pretrained = load_file(folder / WEIGHTS_FILE)
    for name in ("q_proj.weight", "fc1.weight"):
        theirs = pretrained[f"model.encoder.layers.0.{'self_attn.' * (name[0] == 'q')}{name}"]
        assert any(torch.equal(tensor, theirs) for tensor in weights.values())
    bundle = load_bundle(run)
    head = bundle.model.network.ctc_lin.weight
    assert any(torch.equal(head, tensor) for tensor in trained.values())
    assert bundle.decoder_tokenizer is not None
    assert not (run / "bundle/huggingface").exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_encoder_is_not_measured(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "encoder", "whisper", max_source_positions=1500)
    yaml = {"yaml": "hparams/ctc_whisper.yaml", "tiny": PRETRAINED}
    assert workplace.train_here(tmp_path / "run", f"--pretrained={folder}", **yaml) == 0
    assert "before training" not in capsys.readouterr().out
    assert not (tmp_path / "run" / BEFORE_TRAINING).exists()


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, True),
        ({"pretrained": None}, False),
        ({"init_from": ["a", "b"]}, False),  # the mean of two models, which no folder has
        ({"decoder_task": "translate"}, False),  # it writes texts of another language
    ],
)
def test_start_is_one_recognizer(
    changes: dict[str, Any], is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_training, "pretrained_folder", lambda _: tmp_path)
    monkeypatch.setattr(before_training, "require_recognizer", lambda _: "a class")
    settings = {"pretrained": "openai/whisper-tiny", "language": "en", **changes}
    run: Any = SimpleNamespace(spec=SimpleNamespace(settings=settings))
    expected = {"folder": tmp_path, "language": "en"} if is_found else None
    assert find_start(run) == expected


def test_worse_sets_are_named_with_their_intervals() -> None:
    interval = Interval(low=0.1, high=0.3, unit="clip", unit_count=20)

    def figures(substitutions: int) -> TextFigures:
        counts = ErrorCounts(substitutions=substitutions, reference_length=100)
        errors = TextErrors(characters=counts)
        return TextFigures(errors=errors, by_words=False, intervals={"CER": interval})

    before, after = ({"test": figures(count), "noise": figures(50)} for count in (18, 20))
    (line,) = describe_worse(AsrTask.metrics, before, {**after, "other": after["test"]})
    assert line == (
        "test: the run ends worse than it began: CER 20.0 % (10.0 to 30.0), before training "
        "18.0 % (10.0 to 30.0)."
    )
    assert not [*describe_worse(AsrTask.metrics, after, before)]

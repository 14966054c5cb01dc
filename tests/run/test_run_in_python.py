"""A run from Python does all that `train.py` does, and its folder may be moved."""

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from torch import nn

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.base import machine
from sbkit.base.checksums import write_checksums
from sbkit.base.errors import BundleError, ConfigError, DataError, SbkitError
from sbkit.base.files import open_lock, to_json, try_lock
from sbkit.base.machine import NvidiaDriver
from sbkit.check.check import open_checked_run
from sbkit.check.settings import COMMAND_KEYS, LATER_KEYS, check_formats, check_freezing
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.rng import isolated_rng
from sbkit.commands.cli import run as sbkit
from sbkit.config.keys import KEYS
from sbkit.config.overrides import parse_overrides
from sbkit.export.export import exported_bundle
from sbkit.lm import training
from sbkit.lm.language_models import load
from sbkit.lm.ngram import SPECIAL
from sbkit.logs.run_log import read_log
from sbkit.run.run import Run, set_results_aside
from sbkit.run.tuning import tune
from sbkit.tasks.asr.predict import Transcriber
from sbkit.text import tokenizer
from sbkit.train.setup import declare_run
from tests.runs import (
    ROOT,
    TINY,
    Workplace,
    contents_of,
    one_thread,
    read_json,
    rows_of,
    stopped_after,
)
from tests.shortage import refusing
from tests.train.lines import brain_of

YAML = ROOT / "hparams/ctc.yaml"
SMALL = {**parse_overrides(TINY), "number_of_epochs": 2}
Overrides = dict[str, object]


@pytest.fixture(autouse=True)
def _small_machine(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    with one_thread():
        yield


@pytest.fixture(scope="module")
def finished(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overrides]:
    """Train a run; return its overrides."""
    folder = tmp_path_factory.mktemp("python")
    overrides: Overrides = {
        **SMALL,
        "data_folder": workplace.release,
        "output_folder": str(folder / "run"),
        "check": True,
        "lr": np.float64(0.002),  # as a sweep draws it
        "Transformer.dropout": 0.05,
    }
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setenv("SBKIT_CACHE", str(workplace.cache))
        state = torch.get_rng_state()
        Run(YAML, overrides).train()
        assert torch.equal(torch.get_rng_state(), state)
    yield overrides


def folder_of(overrides: Overrides) -> Path:
    return Path(str(overrides["output_folder"]))


@pytest.mark.slow
def test_finished_run_tells_its_history_and_scores(finished: Overrides) -> None:
    run = Run(YAML, finished)
    assert [epoch["epoch"] for epoch in run.history] == [1, 2]
    assert {"loss", "valid_loss", "CER", "WER"} <= run.history[-1].keys()
    assert run.scores["test"] == read_json(run.folder / "summary.json")["test"]["test"]
    assert "Transformer.dropout" in (run.folder / "train.log").read_text()
    weights = load_file(run.folder / "bundle/model.safetensors")
    state = torch.get_rng_state()
    assert weights.keys() == run.model.state_dict().keys()
    run.check()
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(run).startswith(f"Run({str(YAML)!r}, {{'device': 'cpu'")
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    assert "Linear(in_features=" in repr(run.model)
    assert repr(run.model).endswith(f"\n{num_parameters:,} parameters; torch, cpu, fp32")


def test_errors_of_a_run_have_the_worst_first(finished: Overrides, workplace: Workplace) -> None:
    run = Run(YAML, finished)
    errors = pd.DataFrame(run.errors("test"))
    with Transcriber.load(run.folder, device="cpu") as transcriber:
        texts = [transcript.text for transcript in transcriber([*errors["path"][:2]])]
        assert texts == [*errors["hypothesis"][:2]]
        assert transcriber(errors["path"][0]).text == texts[0]
    clips = workplace.release / "clips"
    transcripts = {str(clips / row["path"]): row for row in rows_of(workplace.release / "test.tsv")}
    assert {*errors["path"]} == transcripts.keys()
    assert errors["WER"].is_monotonic_decreasing
    assert errors.columns.tolist()[:4] == ["id", "reference", "hypothesis", "greedy"]
    with pytest.raises(SbkitError, match="has no texts of a test set exam"):
        run.errors("exam")


@pytest.mark.slow
def test_function_of_each_epoch_may_end_the_run(workplace: Workplace, tmp_path: Path) -> None:
    overrides = {**SMALL, "data_folder": workplace.release, "output_folder": tmp_path}
    run = Run(YAML, overrides)
    seen: list[Any] = []

    def prune(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == 1:
            raise ZeroDivisionError("pruned")

    with pytest.raises(ZeroDivisionError, match="pruned"):
        run.train(on_epoch=prune)
    assert seen == run.history
    Run(YAML, overrides).train(on_epoch=prune)
    assert seen == run.history
    assert [record["epoch"] for record in seen] == [1, 2]


RESULTS: dict[str, Callable[[Run], object]] = {
    "history": lambda run: run.history,
    "scores": lambda run: run.scores,
    "model": lambda run: run.model,
    "tune": lambda run: run.tune(out=run.folder.parent / "tuned"),
    "train": Run.train,
}


@pytest.mark.slow(30)
@pytest.mark.parametrize("way", ["train", "make_brain"])
def test_start_makes_data_tokenizer_and_language_models_once(
    way: str, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check used to make them for itself, and each later start again."""
    calls: list[str] = []

    def note(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_note(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return make(*arguments, **options)

        return make_and_note

    def start(lr: float) -> Run:
        calls.clear()
        more = {"output_folder": tmp_path, "check": True, "word_lm_order": 2, "lr": lr}
        more |= {"data_folder": workplace.release}
        run = Run(YAML, {**SMALL, **more}, recipe=recipe)
        if way == "make_brain":
            run.make_brain()
        else:
            with pytest.raises(KeyboardInterrupt):
                run.train()
        return run

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    noted = staticmethod(note("splits", AsrRecipe.prepare_splits))
    recipe = type("Noted", (AsrRecipe,), {"prepare_splits": noted})
    monkeypatch.setattr(tokenizer, "_train", note("tokenizer", tokenizer._train))
    monkeypatch.setattr(training, "train", note("model", training.train))
    monkeypatch.setattr(AsrBrain, "fit", stop)
    if way == "train":
        with pytest.raises(ConfigError, match="`lr`"):
            start(25.0)
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    start(0.002)
    assert calls == ["splits", "tokenizer", "model"]
    if way == "train":
        assert "language model of words: 2-grams" in (tmp_path / "train.log").read_text()
    start(0.002)
    assert calls == ["splits"]


@pytest.mark.parametrize("result", RESULTS)
def test_another_setting_in_the_same_folder_is_refused(finished: Overrides, result: str) -> None:
    """It used to train nothing, and to return the scores of the first one."""
    use = RESULTS[result]
    with pytest.raises(SbkitError, match="lr: 0.002 before, 0.004 now"):
        use(Run(YAML, {**finished, "lr": 0.004}))
    with pytest.raises(SbkitError, match="d_model"):
        use(Run(YAML, {**finished, "d_model": 48}))
    with pytest.raises(
        SbkitError,
        match="beam_size.*another decoder, report or format, run sbkit tune",
    ):
        use(Run(YAML, {**finished, "beam_size": 4}))
    assert Run.open(folder_of(finished)).settings["lr"] == 0.002


def test_run_without_a_model_says_so(tmp_path: Path) -> None:
    run = Run(YAML, {"output_folder": tmp_path})
    out = tmp_path / "bundle"
    for use in (lambda: run.model, lambda: run.tune(out=out), lambda: run.export(out)):
        with pytest.raises(SbkitError, match=r"has no model yet. Call `train\(\)`."):
            use()
    with pytest.raises(TypeError, match="'out'"):
        run.tune()  # type: ignore[call-arg]


@pytest.mark.parametrize("missing", ["", "bundle", "summary.json", "report.html"])
def test_run_is_tested_again_unless_all_results_are_there(
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A test that was killed between its summary and its report."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "summary.json").write_text('{"provenance": {"weights": "a"}}')
    (tmp_path / "report.html").touch()
    if missing:
        (tmp_path / missing).rename(tmp_path / "gone")
    stages = ("make_bundle", "keep_better_start", "write_declared_formats", "report")
    calls = {name: Mock() for name in stages}
    for name, call in calls.items():
        monkeypatch.setattr(f"sbkit.run.run.{name}", call)
    brain = brain_of()
    monkeypatch.setattr(brain, "load_tested_weights", Mock())
    prepared: Any = SimpleNamespace(loaders=SimpleNamespace(test=()))
    with caplog.at_level(logging.INFO):
        Run(YAML, {"output_folder": tmp_path})._finish(prepared, brain)
    assert {call.called for call in calls.values()} == {missing != ""}
    assert ("next: sbkit export" in caplog.text) == (missing != "bundle")


def test_results_of_a_run_that_is_trained_further_are_set_aside(tmp_path: Path) -> None:
    """Those that an earlier start has set aside after the same epoch are replaced."""
    checkpointer = Checkpointer(tmp_path / "checkpoints", recoverables={"m": nn.Linear(1, 1)})
    checkpointer.save_checkpoint(meta={"epoch": 3})
    for start in ("earlier", "later"):
        (tmp_path / "bundle").mkdir()
        for name in ("summary.json", "bundle/config.json"):
            (tmp_path / name).write_text(start)
        set_results_aside(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"checkpoints", "bundle-3", "summary-3.json"}
        for name in ("summary-3.json", "bundle-3/config.json"):
            assert (tmp_path / name).read_text() == start


@pytest.mark.slow
def test_interrupted_run_goes_on_with_the_next_call(finished: Overrides, tmp_path: Path) -> None:
    run = Run(YAML, {**finished, "output_folder": tmp_path, "check": False})
    run.make_loaders()
    run = pickle.loads(pickle.dumps(run))  # as a pool of processes takes it
    with stopped_after(5), pytest.raises(KeyboardInterrupt, match="saved"):
        run.train()
    run.train()
    assert run.scores == Run(YAML, finished).scores
    shutil.rmtree(tmp_path)  # as one does in a notebook, to begin afresh
    run.train()
    assert run.scores == Run(YAML, finished).scores


def test_tuned_decoder_has_a_bundle_of_its_own(finished: Overrides, tmp_path: Path) -> None:
    run = Run.open(folder_of(finished))
    before = contents_of(run.folder)
    out = run.tune(out=tmp_path / "tuned", word_lm_order=2, beam_size=4)
    decoder = read_json(out / "config.json")["decoder"]
    assert (decoder["beam_size"], decoder["attention_rescoring"]) == (4, False)
    assert contents_of(run.folder) == before
    text = tmp_path / "talks.txt"
    text.write_text("one two three\n")
    spec = declare_run(run.folder / "hyperparams.yaml", {"lm_text": str(text)})
    out = tune(run.folder, out=tmp_path / "declared", spec=spec, word_lm_order=1)
    models, _, _ = load(out / "lm.safetensors")
    assert {*models["words"].words[len(SPECIAL) :]} == {"one", "two", "three"}
    dev = str(Path(str(finished["data_folder"]), "dev.tsv"))
    for name, *orders in (("second",), ("third", "--word-lm-order=0", "--token-lm-order=0")):
        assert sbkit(["tune", str(out), "--data", dev, "--out", str(tmp_path / name), *orders]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("average", [1, 2])
def test_record_of_a_test_names_the_epoch_of_its_weights(
    average: int, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to name `number_of_epochs`, also after an early stop."""
    get_worse = iter(range(9))
    monkeypatch.setattr(AsrBrain, "measure", lambda *_: {"CER": float(next(get_worse))})
    stopping = {"number_of_epochs": 40, "early_stopping": 1, "average_checkpoints": average}
    folders = {"data_folder": workplace.release, "output_folder": tmp_path}
    Run(YAML, {**SMALL, **stopping, **folders}).train()
    *epochs, test = (r for r in read_log(tmp_path / "train_log.jsonl") if r["kind"] != "step")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    tested = epochs[average - 1]
    assert (test["kind"], test["epoch"], test["step"]) == ("test", average, tested["step"])


def test_moved_run_has_the_same_figures(
    finished: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Run(YAML, finished).scores["test"]
    shutil.copytree(folder_of(finished), tmp_path / "moved/run")
    monkeypatch.chdir(tmp_path / "moved")
    for name in ("bundle", "summary.json"):
        path = Path("run", name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    log = Path("run/train_log.jsonl")
    lines = log.read_text("utf-8")
    log.write_text(lines + '{"note": "moved"}\n', "utf-8")
    run = Run.open("run")
    monkeypatch.chdir("/")  # the folder is where it was when the run was opened
    scores = run.test()
    monkeypatch.chdir(tmp_path / "moved")
    assert scores["test"] == before
    assert log.read_text("utf-8") == lines  # a repeated test replaces its records
    run.export(tmp_path / "bundle")
    clip = rows_of(Path(str(finished["data_folder"]), "test.tsv"))[0]["path"]
    with Transcriber.load(tmp_path / "bundle", device="cpu") as recognizer:
        recognizer.transcribe(Path(str(finished["data_folder"]), "clips", clip))
    descriptor = open_lock(Path("run"))
    assert try_lock(descriptor, if_unsupported=False)  # released when the test has ended
    with pytest.raises(ConfigError, match="run, "):
        run.test()
    os.close(descriptor)
    config = Path("run/bundle/config.json")
    config.write_text(to_json({**read_json(config), "checkpoints": []}))  # those before training
    write_checksums(config.parent)
    Path("run/summary.json").unlink()
    run.test()
    test = read_log(log)[-1]
    assert (test["kind"], test["epoch"], test["step"]) == ("test", 0, 0)


def test_brain_of_a_run_has_its_initial_weights(finished: Overrides, tmp_path: Path) -> None:
    """These steps used to be left out, unless train.py took them."""
    folders = {"init_from": folder_of(finished), "output_folder": tmp_path}
    run = Run(YAML, {**finished, **folders, "check": False})
    brain = run.make_brain()
    with refusing("tempfile.mkdtemp", OSError()), exported_bundle(folder_of(finished)) as bundle:
        trained = load_file(bundle / "model.safetensors")
    for name, value in brain.modules["model"].state_dict().items():
        assert torch.equal(value, trained[name])
    assert (tmp_path / "hyperparams.yaml").is_file()
    with pytest.raises(BundleError):
        brain.evaluate(run.make_loaders().test)
    with pytest.raises(SbkitError, match="must be `brain.hparams.epoch_counter`"):
        brain.fit(range(1, 3), run.make_loaders().train)
    with pytest.raises(BundleError):
        _ = run.scores


class OwnBrain(AsrBrain):
    """A Brain of one's own, as a notebook defines it."""


class Own(AsrRecipe):
    brain = OwnBrain


@pytest.mark.slow
def test_own_brain_is_needed_to_continue_its_run(finished: Overrides, tmp_path: Path) -> None:
    own = {**finished, "output_folder": tmp_path / "own", "check": False, "number_of_epochs": 1}
    Run(YAML, own, recipe=Own).train()
    assert __name__ in read_json(tmp_path / "own/run_config.json")["modules"]
    with pytest.raises(SbkitError, match="recipe: tests.*.Own before, .*AsrRecipe now"):
        Run.open(tmp_path / "own").test()
    assert Run.open(tmp_path / "own", recipe=Own).test() == Run(YAML, own).scores


def rows(release: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split with their audio as arrays."""
    listed = []
    for row in rows_of(release / f"{split}.tsv"):
        samples, rate = soundfile.read(release / "clips" / row["path"], dtype="int16")
        audio = {"array": samples, "sampling_rate": rate}
        listed.append({"id": row["path"], "audio": audio, "sentence": row["sentence"]})
    return listed


def test_corpus_may_be_rows_of_python(workplace: Workplace, tmp_path: Path) -> None:
    """Mappings with arrays, a DataFrame with paths, and a dataset give the clips of a table."""
    clips = workplace.release / "clips"
    frame = pd.DataFrame(rows_of(workplace.release / "dev.tsv"))
    frame["path"] = [clips / name for name in frame["path"]]
    test = rows_of(workplace.release / "test.tsv")
    audio, texts = [str(clips / row["path"]) for row in test], [row["sentence"] for row in test]
    dataset = datasets.Dataset.from_dict({"audio": audio, "text": texts})
    dataset = dataset.cast_column("audio", datasets.Audio())
    corpus = {"train": rows(workplace.release, "train"), "dev": frame, "test": dataset}
    run = Run(YAML, {**SMALL, "output_folder": tmp_path}, corpus=corpus)
    own = run.prepare_splits().named()
    table = {**SMALL, "output_folder": tmp_path / "b", "data_folder": workplace.release}
    splits = Run(YAML, table).prepare_splits().named()
    assert own.keys() == splits.keys()
    for name, split in splits.items():
        assert own[name]["text"][:] == split["text"][:]
        assert own[name]["samples"][:] == split["samples"][:]


@pytest.mark.parametrize(
    ("corpus", "error"),
    [
        ([{"path": "a.wav"}], "`corpus` must map train, dev and test to rows, but is a list"),
        ({"train": []}, r"`corpus\['train'\]`: There are no rows"),
        ({"train": "a.csv"}, r"`corpus\['train'\]`: Rows must be mappings.* but one row is a"),
        ({"train": [{"audio": [0.0] * 9}]}, "`sample_rate`"),
        ({"train": [{"path": "a.wav", "text": "a"}]}, "no files for dev. .*, or rows to `corpus`"),
    ],
)
def test_corpus_that_cannot_be_read_is_named(corpus: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match=error):
        Run(YAML, {"output_folder": tmp_path}, corpus=corpus).prepare_splits()


def test_run_in_another_thread_is_refused() -> None:
    """Both would draw from torch's global generator, and neither could be repeated."""

    def build() -> None:
        with isolated_rng(torch.device("cpu")):
            pass

    with isolated_rng(torch.device("cpu")), ThreadPoolExecutor() as threads:
        second = threads.submit(build)
        with pytest.raises(SbkitError, match="Start each run in its own process"):
            second.result()


def test_start_says_that_no_gpu_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run, and of a Brain in a script."""
    monkeypatch.setattr(machine, "read_driver", lambda: NvidiaDriver(cuda="13.0", failure="none"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        "sbkit.run.run.check_before_training", Mock(side_effect=DataError("no data"))
    )
    for device, num_warnings in ((None, 2), ("cpu", 0)):
        with pytest.raises(DataError, match="no data"):
            Run(YAML, {"output_folder": tmp_path, "device": device}).train()
        brain_of(device=device)
        assert caplog.text.count("NVIDIA's driver") == num_warnings
        caplog.clear()


@pytest.mark.parametrize("step", [Run.train, Run.prepare, Run.prepare_splits])
def test_value_out_of_range_ends_each_step_before_it_begins(
    step: Callable[[Run], object], tmp_path: Path
) -> None:
    """An empty shell variable as `data_folder` used to prepare the default corpus."""
    run = Run(YAML, {"data_folder": "", "output_folder": tmp_path / "run"})
    with pytest.raises(ConfigError, match=r"`data_folder` must be .*\(override of data_folder\)"):
        step(run)
    assert not (tmp_path / "run").exists()


def test_edit_of_the_yaml_changes_neither_the_check_nor_the_run(
    workplace: Workplace, tmp_path: Path
) -> None:
    """The check read the file again: it judged the edit, and the run trained the other."""
    yaml = tmp_path / "own.yaml"
    yaml.write_text(f"base: {YAML}\nmax_grad_norm: 4.0\n")
    overrides = {**SMALL, "data_folder": str(workplace.release), "number_of_epochs": 1}
    run = Run(yaml, {**overrides, "output_folder": tmp_path / "run"})
    yaml.write_text("base: nowhere.yaml\n")
    assert [*run.check()] == [*run.check()]
    run.train()
    assert run.scores["test"]
    assert "max_grad_norm: 4.0\n" in (run.folder / "hyperparams.yaml").read_text()
    other = Run(run.folder / "hyperparams.yaml", {"num_workers": 1})
    (run.folder / "hyperparams.yaml").write_text("base: nowhere.yaml\n")
    other.train()  # it has ended: its folder keeps the values that it was trained with
    assert "\nnum_workers: 0 " in (run.folder / "hyperparams.yaml").read_text()


def test_keys_that_only_a_run_reads_are_those_that_the_check_excuses(
    finished: Overrides, tmp_path: Path
) -> None:
    started = {"init_from": str(finished["output_folder"]), "init_from_differs": ["text"]}
    overrides = {**finished, **started, "output_folder": tmp_path, "number_of_epochs": 1}
    run = Run(YAML, overrides)
    with open_checked_run(declare_run(YAML, overrides)) as checked:
        for check in (check_formats, check_freezing):
            list(check(checked) or ())
        settings = (checked.spec.settings, checked.copy.spec.settings, checked.copy.hparams)
        names_before = set[str]().union(*(s.names_read for s in settings))
    run.train()
    names_after = run.settings.names_read | run.prepare().hparams.names_read
    later = (names_after - names_before - COMMAND_KEYS) & {*KEYS}
    assert later >= LATER_KEYS
    assert later - LATER_KEYS <= {*AsrRecipe.keys} - {*KEYS}

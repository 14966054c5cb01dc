"""Signals and early stopping end a run, on all ranks together."""

import errno
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import TensorDataset

from recipes.asr.brain import AsrBrain
from sbkit.base.errors import (
    BAD_INPUT,
    FAILED,
    ConfigError,
    DataError,
    StopRequestedError,
    StoreError,
)
from sbkit.base.files import RUN_CONFIG_FILE
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.ranking import AVERAGED_FILE
from sbkit.checkpoint.run_config import CHECKPOINTS, LIMIT_PATH
from sbkit.evaluate.run_results import SUMMARY
from sbkit.logs.metric import Metric
from sbkit.logs.run_log import LOG_FILE, read_log
from sbkit.run import export_and_test
from sbkit.train.evaluation import Evaluator
from sbkit.train.stopping import (
    FIT_SECONDS,
    STALE_VALIDATIONS,
    EpochSaver,
    StopSignals,
    TimeLimit,
    find_ends,
    train_restartably,
)
from tests.runs import Workplace, read_json, records_of
from tests.train.lines import LineBrain, ScheduleFree, brain_of, line, loader, rows


def test_stop_signals_keep_ignoring_sighup_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Interrupted(LineBrain):
    """Press Ctrl-C at a call of a method, the first time."""

    interrupts: str = ""  # the method and the optimizer step
    metrics: ClassVar = {"error": Metric(is_fraction=False)}

    def _interrupt(self, method: str) -> None:
        if f"{method} {self.optimizer_step}" == self.interrupts:
            self.interrupts = ""
            os.kill(os.getpid(), signal.SIGINT)

    def on_fit_batch_end(self, *_: Any) -> None:
        self._interrupt("step")

    def score(self, outputs: torch.Tensor, batch: Any) -> list[float]:
        self._interrupt("score")
        return cast("list[float]", (outputs - batch[1]).square().sum(1).tolist())

    def measure(self, results: Sequence[float]) -> dict[str, float]:
        return {"error": sum(results) / len(results)}


def interrupted_brain(
    folder: Path | None, interrupts: str, optimizer: Any = torch.optim.SGD, **settings: float
) -> tuple[Any, Callable[[], None]]:
    """Return a Brain, and what fits it to four steps in each of three epochs."""
    model, epochs, data = line(), EpochCounter(3), TensorDataset(*rows(8))
    recoverables = {"model": model, "epochs": epochs}
    checkpointer = folder and Checkpointer(folder, recoverables=recoverables)
    hparams = {"average_checkpoints": 2, "epoch_counter": epochs, **settings}
    parts = {"model": model, "hparams": hparams, "checkpointer": checkpointer}
    brain = brain_of(Interrupted, optimizer=optimizer, **parts)
    brain.interrupts = interrupts
    shuffled = {"batch_size": 2, "shuffle": True}
    return brain, partial(brain.fit, epochs, data, data, train_loader_kwargs=shuffled)


def validations_in(folder: Path) -> list[tuple[int, bool, float]]:
    """Return the step, the position and the error of each checkpoint of a validation."""
    metas = [checkpoint.meta for checkpoint in Checkpointer(folder).list_checkpoints()]
    figures = [(m["optimizer_step"], m["end-of-epoch"], m["error"]) for m in metas if "error" in m]
    return sorted(figures)


@pytest.mark.parametrize("interrupts", ["", "step 2", "step 3", "score 3", "step 5", "score 8"])
@pytest.mark.parametrize("averages", [{"ema_decay": 0.5}, {"optimizer": ScheduleFree}])
def test_validation_within_an_epoch_changes_no_weight_also_of_an_interrupted_run(
    averages: dict[str, Any], interrupts: str, tmp_path: Path
) -> None:
    """Before, at and after its step, and while it validates; the draws of the loader go on.

    The log has the same means, too, of two steps and of an epoch.
    """
    weights, losses = [], []
    for name, interrupt, interval in (("a", interrupts, 3), ("b", "", 3), ("c", "", 0)):
        settings = {"valid_interval_steps": interval, "average_checkpoints": 9, **averages}
        settings |= {"output_folder": str(tmp_path / name / "run"), "log_every": 2}
        torch.manual_seed(5)
        brain, fit = interrupted_brain(tmp_path / name, interrupt, **settings)
        if interrupt:
            with pytest.raises(KeyboardInterrupt, match="checkpoint saved"):
                fit()
            brain, fit = interrupted_brain(tmp_path / name, "", **settings)
        fit()
        weights.append(brain.modules["model"].weight)
        records = read_log(tmp_path / name / "run" / LOG_FILE)
        means = [r["loss"] for r in records if r["kind"] == "step" or r["step"] % 4 == 0]
        losses.append(means)
        assert len(means) == 6 + 3
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])
    for means in losses[:2]:
        assert means == pytest.approx(losses[2], rel=1e-15, abs=0)
    for first, second, of_epoch in zip(*(losses[2][n::3] for n in range(3)), strict=True):
        assert of_epoch == pytest.approx((first + second) / 2)
    steps = [(step, is_end) for step, is_end, _ in validations_in(tmp_path / "b")]
    assert steps == [(3, False), (4, True), (6, False), (8, True), (9, False), (12, True)]
    assert validations_in(tmp_path / "a") == validations_in(tmp_path / "b")
    of_epochs = [figures for figures in validations_in(tmp_path / "b") if figures[1]]
    assert of_epochs == validations_in(tmp_path / "c")


def test_early_stopping_ends_a_run_within_an_epoch(tmp_path: Path) -> None:
    """The same command trains no further, and more patience trains on from that step."""
    folder = tmp_path / CHECKPOINTS
    for patience, step in ((2, 3), (2, 3), (4, 5), (0, 12)):
        settings = {"valid_interval_steps": 1, "early_stopping": patience}
        brain, fit = interrupted_brain(folder, "", **settings)
        brain.score = lambda outputs, batch: [1.0] * len(outputs)  # all are equal
        fit()
        newest = newest_checkpoint(folder)
        assert newest is not None
        assert newest.meta["optimizer_step"] == step
        assert newest.meta[STALE_VALIDATIONS] == step - 1
        stopped, epochs = {"early_stopping": step - 1}, {LIMIT_PATH: 3} if step == 12 else {}
        ends = stopped if patience else {}
        assert find_ends(tmp_path, {"early_stopping": patience}, 3) == ends | epochs
        assert find_ends(tmp_path, {"early_stopping": step}, 3) == epochs
    assert find_ends(tmp_path, {}, 4) == find_ends(tmp_path, {}, None) == {}


def test_last_steps_are_validated_though_a_validation_within_the_epoch_came_before(
    tmp_path: Path,
) -> None:
    brain, fit = interrupted_brain(tmp_path / CHECKPOINTS, "", valid_interval_steps=3)
    brain._fit_valid = lambda *_: None  # of a recipe
    fit()
    assert validations_in(tmp_path / CHECKPOINTS)[-1][0] == 12
    fit()  # it trains nothing
    assert brain.optimizer_step == 12


def test_run_that_its_steps_have_ended_begins_no_further_epoch(tmp_path: Path) -> None:
    """The epoch used to have no step, a loss of NaN, and a checkpoint."""
    for _ in range(2):
        brain, fit = interrupted_brain(tmp_path / CHECKPOINTS, "", optimizer_step_limit=6)
        fit()
        newest = newest_checkpoint(tmp_path / CHECKPOINTS)
        assert newest is not None and (newest.meta["epoch"], brain.optimizer_step) == (2, 6)
    assert find_ends(tmp_path, {"optimizer_step_limit": 6}, 9) == {"optimizer_step_limit": 6}
    assert find_ends(tmp_path, {"optimizer_step_limit": 7}, 9) == {}


def test_a_checkpointer_of_speechbrain_cannot_validate_within_an_epoch(tmp_path: Path) -> None:
    """It would mark the checkpoint as the end of the epoch."""
    keeper = SpeechBrainCheckpointer(tmp_path)
    with pytest.raises(ConfigError, match="needs the checkpointer sbkit.Checkpointer"):
        brain_of(hparams={"valid_interval_steps": 2}, checkpointer=keeper)


@pytest.mark.parametrize("interrupts", ["", "step 6", "step 8", "score 8", "score 12"])
def test_ctrl_c_in_a_script_is_caught_and_next_fit_goes_on(interrupts: str, tmp_path: Path) -> None:
    """Within an epoch, at its end, in its validation, and in the last one."""
    handler = signal.getsignal(signal.SIGINT)
    brain, fit = interrupted_brain(tmp_path, interrupts)
    if interrupts:
        step = interrupts.split()[1]
        with pytest.raises(KeyboardInterrupt, match=f"Stopped at step {step}; checkpoint saved"):
            fit()
        assert signal.getsignal(signal.SIGINT) is handler
    fit()
    _, fit_whole = whole = interrupted_brain(tmp_path / "whole", "")
    fit_whole()
    assert brain.optimizer_step == 12
    assert torch.equal(brain.modules["model"].weight, whole[0].modules["model"].weight)


def test_brain_without_checkpointer_says_that_nothing_is_saved() -> None:
    brain, fit = interrupted_brain(None, "step 6")
    with pytest.raises(KeyboardInterrupt, match="step 6; there is no checkpointer to save it"):
        fit()
    fit()  # the third epoch
    assert brain.optimizer_step == 10


def test_interrupted_averaging_chooses_nothing(tmp_path: Path) -> None:
    brain, fit = interrupted_brain(tmp_path, "")
    fit()
    brain.interrupts = "score 12"
    with pytest.raises(StopRequestedError):
        brain.evaluate(loader(4, 2))
    assert not (tmp_path / AVERAGED_FILE).exists()
    assert brain.evaluate(loader(4, 2)) > 0
    scores = read_json(tmp_path / AVERAGED_FILE)["scores"]
    assert len(scores) == 2
    assert min(scores.values()) > 0


def timed_brain(folder: Path, seconds: float) -> tuple[Any, Callable[[], None], list[float]]:
    """Return a Brain with a limit, whose steps take a second; its fit, and its shares."""
    brain, fit = interrupted_brain(folder, "")
    limit = TimeLimit(seconds / 60, clock=lambda: float(brain.optimizer_step))
    brain.stopping.time_limit = limit
    shares: list[float] = []
    brain.on_fit_batch_start = lambda *_: shares.append(brain.run_share)
    return brain, fit, shares


def test_max_minutes_end_a_run_within_an_epoch_and_go_on_with_more(tmp_path: Path) -> None:
    """Three epochs of four steps would be twelve; the share of the run leads to the end of both."""
    brain, fit, shares = timed_brain(tmp_path / CHECKPOINTS, 6)
    brain._fit_valid = lambda *_: None  # of a recipe; the last epoch is validated in any case
    fit()
    assert shares == pytest.approx([step / 6 for step in range(6)])
    newest = newest_checkpoint(tmp_path / CHECKPOINTS)
    assert newest is not None
    figures = {"epoch": 2, "optimizer_step": 6, FIT_SECONDS: 6}
    assert newest.meta.items() >= figures.items()
    assert "error" in newest.meta  # it was validated
    fit()
    assert brain.optimizer_step == 6
    for minutes in (0.1, 0.2):
        ends = {"max_minutes": 0.1} if minutes == 0.1 else {}
        assert find_ends(tmp_path, {"max_minutes": minutes}, 3) == ends

    brain, fit, shares = timed_brain(tmp_path / CHECKPOINTS, 20)
    fit()  # its clock starts at the 6 seconds of the checkpoint
    assert brain.optimizer_step == 10  # after the third epoch
    assert shares == pytest.approx([2 / 3, 3 / 4, 5 / 6, 11 / 12])


def test_ranks_follow_the_clock_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two questions, and until the limit is over for all, the share stays the same."""
    first_share = 0.0
    monkeypatch.setattr("sbkit.train.stopping.world_size", lambda: 2)
    monkeypatch.setattr(
        "sbkit.train.stopping.gather_over_ranks",
        lambda _: [(False, False, first_share, 1e-3)] * 2,  # the last is seconds a step
    )
    limit = TimeLimit(1, clock=lambda: 999.0)  # this rank's
    saver = EpochSaver(None, minutes=0, steps=0, max_steps=None, time_limit=limit)
    shares = []
    for step in range(1, 61):
        first_share = step / 58
        saver.after_micro_batch(step, ends_step=True, is_last=step == 60)
        shares.append(limit.share * 58)
        assert limit.is_over is (step == 60)
    assert shares == pytest.approx([1] * 25 + [26] * 25 + [51] * 9 + [60])


@pytest.mark.slow
@pytest.mark.ddp
def test_run_of_many_minutes_is_exported_and_tested(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--number_of_epochs=10000", "--max_minutes=0.05", "--log_every=1")
    process = workplace.train_forked(tmp_path, *options, ranks=2)
    assert process.returncode == 0, process.stderr
    assert "the clock ends this run (`max_minutes`)" in process.stdout
    assert not read_json(tmp_path / "run_config.json")["is_repeatable"]
    num_steps = len(records_of(tmp_path, "step"))
    assert (tmp_path / "bundle").is_dir()
    assert (tmp_path / "summary.json").is_file()
    assert workplace.train_here(tmp_path, *options) == 0
    assert len(records_of(tmp_path, "step")) == num_steps


def test_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    brain, fit = interrupted_brain(tmp_path, "")
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert brain.optimizer_step == 12


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_early_stopping_counts_validations_since_the_best(lower_is_better: bool) -> None:
    """An equal one is no better; NaN is the worst, and several of them are no reason to stop."""
    metrics = {"figure": Metric(lower_is_better=lower_is_better)}
    evaluator = Evaluator(metrics, lambda results: {"figure": results[0]})
    assert evaluator.stale == 0
    since = []
    for figure in (math.nan, math.nan, 0.7, 0.5, 0.5, math.nan, 0.4, 0.7, 0.4):
        evaluator.start(["dev"])
        evaluator.add([figure if lower_is_better else -figure])
        evaluator.end_validation(1)
        since.append(evaluator.stale)
    assert since == [0, 0, 0, 0, 1, 2, 0, 1, 2]


def test_run_stops_early_only_after_a_validation(tmp_path: Path) -> None:
    """One that was saved within an epoch, and has less patience now, trains to the next one."""
    for interrupts, patience, step in (("step 10", 0, 10), ("", 1, 12)):
        settings = {"average_checkpoints": 1, "early_stopping": patience}
        brain, fit = interrupted_brain(tmp_path / CHECKPOINTS, interrupts, **settings)
        brain.score = lambda outputs, batch: [1.0] * len(outputs)  # all are equal
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            fit()
        assert brain.optimizer_step == step
        ends = {} if interrupts else {"early_stopping": 2}
        assert find_ends(tmp_path, {"early_stopping": 1}, 9) == ends


def test_early_stopping_needs_no_checkpointer(caplog: pytest.LogCaptureFixture) -> None:
    """Neither after an epoch nor within one."""
    for interval, step in ((0, 8), (1, 2)):
        settings = {"valid_interval_steps": interval, "early_stopping": 1}
        brain, fit = interrupted_brain(None, "", **settings)
        brain.score = lambda outputs, batch: [1.0] * len(outputs)  # all are equal
        fit()
        assert brain.optimizer_step == step
    sentence = "`early_stopping`: 1 validations were no better; training ends."
    assert caplog.messages.count(sentence) == 2


DISK_FAILS = OSError(errno.EIO, "Input/output error", "disk")
LOST_RANK = RuntimeError("[gloo/transport/tcp/pair.cc:538] Read [::1]: Connection reset by peer")
ENDS = {"before the first step": 0, "once": 7, "again": 7, "later": 8, "there again": 7}
JUDGED, ALWAYS, NEVER = (2, 1, 2, 1, 1), (2, 2, 2, 2, 2), (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (StoreError("s3://lake is away."), JUDGED),
        (DISK_FAILS, JUDGED),
        (MemoryError(), JUDGED),
        (RuntimeError("CUDA error: an ECC error"), JUDGED),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), JUDGED),
        (DataError("A clip is damaged."), ALWAYS),
        (OSError(errno.ENOSPC, "No space left on device", "/nfs/x"), ALWAYS),
        (AttributeError("'types.SimpleNamespace' object has no attribute 'rate'"), ALWAYS),
        (KeyError("rate"), ALWAYS),
        (LOST_RANK, NEVER),  # this rank is not at fault
    ],
    ids=repr,
)
def test_run_that_fails_starts_again_once_at_each_step(
    error: Exception, codes: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        raise error

    def start(step: int, train: Callable[[], None] = train) -> int:
        return train_restartably(train, tmp_path, patience=0, position=lambda: (3, step))

    for code, (end, step) in zip(codes, ENDS.items(), strict=True):
        assert start(step) == code, end
        text = getattr(error, "filename", None) or str(error)[-20:] or "MemoryError"
        is_second = end == "again" and codes is JUDGED
        printed = capsys.readouterr().err
        assert printed.count("The run failed here before") == is_second
        assert printed.count(text) == 1 + is_second
    assert start(9, lambda: None) == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_longer_run_keeps_the_results_of_the_shorter_one_under_other_names(
    workplace: Workplace, tmp_path: Path
) -> None:
    """This is so, too, if it fails before its first step, and the shorter one is tested again."""
    one, two = "--number_of_epochs=1", "--number_of_epochs=2"
    assert workplace.train_here(tmp_path, one) == 0
    with patch.object(AsrBrain, "fit", side_effect=DISK_FAILS):
        assert workplace.train_here(tmp_path, two) == FAILED
    assert workplace.train_here(tmp_path, one) == 0
    of_one_epoch = (tmp_path / "summary.json").read_bytes()
    assert workplace.train_here(tmp_path, two) == 0
    assert (tmp_path / "summary-1.json").read_bytes() == of_one_epoch
    assert read_json(tmp_path / "bundle-1/config.json")["checkpoints"][0]["epoch"] == 1


@pytest.mark.slow
def test_run_killed_after_training_goes_on_with_the_step_that_is_missing(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bundle is made again for other values. A format that fails is named before the test."""
    # Any mean is as good as the best checkpoint, so all are averaged.
    monkeypatch.setattr("sbkit.train.brain.averaging_error", lambda brain: 0.0)
    options = ("--number_of_epochs=2", "--export_formats=[huggingface]")
    steps = ("fit_declared_decoder", "write_bundle", "add_formats", "BundleScorer", "ScoreReport")
    originals = {name: getattr(export_and_test, name) for name in steps}
    saved: list[str] = []

    def take(name: str, *arguments: Any, **options: Any) -> Any:
        saved.append(name)
        if name == dies_in:
            raise DISK_FAILS
        return originals[name](*arguments, **options)

    for name in steps:
        monkeypatch.setattr(export_and_test, name, partial(take, name))
    starts: dict[str, list[str]] = {}
    for dies_in in (*steps, ""):
        saved.clear()
        code = workplace.train_here(tmp_path, *options)
        # No step is between these failures.
        assert code == (0 if not dies_in else FAILED if dies_in == steps[0] else BAD_INPUT)
        assert (tmp_path / "summary.json").exists() is not bool(dies_in)
        starts[dies_in] = [*saved]
    fit, write, formats, score, report = steps
    assert starts == {
        fit: [fit],
        write: [fit, write],
        formats: [fit, write, formats],
        score: [formats, score],
        report: [score, report],
        "": [score, report],
    }
    assert len(records_of(tmp_path, "epoch")) == 2
    config = tmp_path / "bundle/config.json"
    assert len(read_json(config)["checkpoints"]) == 2
    for option in ("--word_lm_order=1", "--average_checkpoints=1"):
        (tmp_path / "summary.json").unlink()
        saved.clear()
        assert workplace.train_here(tmp_path, *options, option, "--log_every=7") == 0
        assert saved == [*steps]
    assert len(read_json(config)["checkpoints"]) == 1
    values = [read_json(tmp_path / name)["values"] for name in (RUN_CONFIG_FILE, SUMMARY)]
    assert [(value["average_checkpoints"], value["log_every"]) for value in values] == [(1, 1)] * 2
    log = (tmp_path / "train.log").read_text().rpartition("writing huggingface")[2]
    assert 0 < log.find("huggingface (all) is not written: ") < log.find("test: CER")

"""Real steps measure what a run takes, find the largest batch that fits, and leave nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sbkit.audio import segments
from sbkit.base.errors import ConfigError, DeviceError
from sbkit.check import batch_seconds, cost
from sbkit.check.batch_seconds import (
    ProbeBatches,
    find_batch_seconds,
    find_fitting_on_gpu,
    largest_fitting,
)
from sbkit.check.check import check_planned_run
from sbkit.check.cost import (
    PROBED_SHARE,
    RealSteps,
    check_cost,
    check_recordings,
    measure_cost,
    padded_samples,
    real_steps,
)
from sbkit.check.planned_run import PlannedRun
from sbkit.commands.cli import run
from sbkit.config.overrides import parse_command
from sbkit.data.batch import Batch
from sbkit.distributed.device import resolve
from tests.check.harness import planned_run
from tests.runs import ROOT, Workplace, one_thread, read_json

YAML = ROOT / "hparams" / "ctc.yaml"
FREE_BYTES = 1000  # 900 may be taken


@pytest.fixture
def planned(workplace: Workplace, tmp_path: Path) -> Iterator[PlannedRun]:
    with planned_run(workplace, tmp_path / "run", "--number_of_epochs=3") as planned:
        yield planned


def test_measured_steps_are_real_and_leave_no_trace(planned: PlannedRun) -> None:
    planned.results["placement"] = resolve("cpu", "bf16")
    random_state = torch.get_rng_state()
    before = [p.clone() for p in planned.require_model().parameters()]
    with real_steps(planned) as steps:
        steps.run_step(steps.load(next(iter(planned.require_sampler()))))
        after = list(steps.brain.modules.parameters())
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    measured = measure_cost(planned)
    unchanged = planned.require_model().parameters()
    assert all(torch.equal(*pair) for pair in zip(before, unchanged, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not planned.run_folder.exists()
    weights = 4 * measured.parameters
    assert 3 * weights <= measured.checkpoint_bytes < 3.2 * weights  # with Adam's two moments
    assert measured.run_seconds == pytest.approx(3 * measured.epoch_seconds, rel=0.05)
    assert measured.peak_bytes > weights


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("all tensors on one device"), "raised RuntimeError (all tensors on one dev"),
        (torch.OutOfMemoryError("CUDA out of memory."), "raise `grad_accumulation_factor"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "raise `grad_accumulation_f"),
    ],
)
def test_step_that_fails_only_on_the_device_is_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """For example because a tensor of a part stays on the CPU."""

    def fail(*_: object) -> None:
        raise error

    planned.make_cpu_brain()
    monkeypatch.setattr(cost, "training_loss", fail)
    (finding,) = check_planned_run(planned, [check_cost])
    assert finding.stops
    assert text in str(finding)


def test_pauses_make_a_batch_of_many_short_utterances_the_largest(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def note_size(_: RealSteps, batch: Batch) -> float:
        sizes.append(len(batch.ids))
        return 1.0

    monkeypatch.setattr(RealSteps, "run_step", note_size)
    monkeypatch.setattr(RealSteps, "require_memory", lambda *_: None)
    monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda _: max(sizes, default=0)))
    options = ("--concat_prob=0", "--batch_seconds=13")
    with planned_run(workplace, tmp_path / "run", *options) as planned:
        batches = [*planned.require_sampler().steps()]
        assert measure_cost(planned).peak_bytes == max(map(len, batches))
        assert sizes[-1] == len(max(batches, key=padded_samples))  # its seconds count
        assert sizes[-1] < max(sizes)


def test_largest_batch_of_an_evaluation_is_measured(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[Batch] = []
    monkeypatch.setattr(RealSteps, "evaluate", lambda _, batch: evaluated.append(batch))
    monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda _: 9e9 if evaluated else 1))
    assert measure_cost(planned).peak_bytes == 9e9
    loaders = planned.make_loaders()
    batches = [*loaders.valid["dev"], *loaders.test["test"]]
    assert evaluated[-1].audio.numel() == max(batch.audio.numel() for batch in batches)


def test_recording_that_is_evaluated_whole_is_named_and_not_measured(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a test set, which is decoded whole; those of dev are greedily."""
    evaluated: list[str] = []
    evaluate = RealSteps.evaluate

    def evaluate_and_note(steps: RealSteps, batch: Batch) -> None:
        evaluated.extend(batch.ids)
        evaluate(steps, batch)

    monkeypatch.setattr(RealSteps, "evaluate", evaluate_and_note)
    monkeypatch.setattr(segments, "MAX_SEGMENT_SECONDS", 0.1)
    dict.update(planned.knobs, eval_batch_seconds=1.0)  # every clip is longer
    (finding,) = check_planned_run(planned, [check_recordings, check_cost])
    ids = planned.prepare_splits().test["test"]["id"][:]
    assert "test has 4 recordings longer than `eval_batch_seconds`" in finding.problem
    assert "sbkit segment" in finding.fix
    assert (sorted(finding.ids), finding.stops) == (sorted(ids), False)
    assert evaluated and not {*evaluated} & {*ids}


def test_batch_that_the_system_would_kill_for_is_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the memory of one part does not grow with the batch."""
    largest = max(planned.require_sampler().steps(), key=padded_samples)
    num_parts = len(largest) / max(1, int(PROBED_SHARE * len(largest)))
    needed_bytes = 50 + 50 * num_parts
    peaks = iter(2 * [30, 130, 30, 180])
    monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda _: next(peaks)))
    with real_steps(planned) as steps:
        monkeypatch.setattr(cost, "available_memory", lambda: needed_bytes)
        steps.require_memory(largest)
    monkeypatch.setattr(cost, "available_memory", lambda: needed_bytes - 1)
    (finding,) = check_planned_run(planned, [check_cost])
    assert "does not fit into memory. Lower `batch_seconds`" in finding.problem


def test_full_disk_is_found(planned: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealSteps, "run_step", lambda *_: 1.0)
    assert list(check_cost(planned)) == []
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (finding,) = check_cost(planned)
    assert (finding.where, finding.stops) == (planned.place("output_folder"), True)
    assert "the run would end with a full disk" in finding.problem


def test_check_command_prints_the_cost_unless_another_machine_is_meant(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.chdir(ROOT)
    arguments = workplace.arguments(tmp_path / "run", "--concat_prob=0.0")
    with one_thread():
        assert run(["check", "--json", *arguments]) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert run(["check", *arguments]) == 0
        printed = capsys.readouterr().out
        assert "peak memory" in printed
        assert re.search(r"seconds per epoch +about [\d.]+, from the measured step\n", printed)
        assert re.search(r"hours for all epochs +about [\d.]+\n", printed)
        assert re.search(r"disk space for 13 checkpoints +[\d.]+ MB\n", printed)
        assert run(["check", "--target=cuda:2", *arguments]) == 0
        assert capsys.readouterr().out == "Nothing found.\n"
    assert record["findings"] == []
    assert record["cost"]["run_seconds"] > record["cost"]["epoch_seconds"] > 0


@pytest.mark.parametrize(
    ("failing_seconds", "max_seconds", "expected"),
    [
        (9999, 5000, 374),  # two bytes a second: the last tenth is not tried
        (9999, 60, 60),
        (9999, 20, 31),  # never less than the longest utterance
        (200, 5000, 186),  # memory ends before its line says so: between 124 and 248
        (30, 5000, None),
    ],
)
def test_largest_fitting_batch_grows_until_memory_ends(
    failing_seconds: int, max_seconds: float, expected: int | None
) -> None:
    def peak_of(seconds: int) -> int | None:
        return 100 + 2 * seconds if seconds <= failing_seconds else None

    limits = {"min_seconds": 31, "max_seconds": max_seconds, "free_bytes": FREE_BYTES}
    fitting = largest_fitting(peak_of, **limits)
    assert (fitting and fitting.seconds) == expected


def test_largest_fitting_batch_is_found_after_an_overshoot() -> None:
    """Attention takes memory by the square of the length."""
    fitting = largest_fitting(
        lambda seconds: seconds**2, min_seconds=6, max_seconds=1000, free_bytes=112
    )
    assert fitting is not None
    assert fitting.seconds == 10


def test_peak_memory_does_not_count_earlier_checks(planned: PlannedRun) -> None:
    with real_steps(planned) as steps:
        before = steps.peak_bytes
        bytearray(b"x") * (500 << 20)
        assert steps.peak_bytes - before > 400 << 20
        steps.reset_peak()
        assert steps.peak_bytes - before < 100 << 20


def test_batch_seconds_auto_is_refused_for_another_machine() -> None:
    with pytest.raises(ConfigError, match="but --target names another machine"):
        find_batch_seconds(YAML, {"batch_seconds": "auto"}, target="cuda:8")


def test_batch_seconds_auto_leaves_a_broken_run_to_the_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"batch_seconds": "auto", "data_folder": str(tmp_path), "output_folder": "none"}
    assert find_batch_seconds(YAML, overrides) == overrides | {"batch_seconds": 60.0}
    assert "auto -> 60 (no step can run: see the errors of " in caplog.text


def test_batch_seconds_auto_is_a_minute_on_the_cpu(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.setattr(batch_seconds, "MIN_AUTO_STEPS", 0.1)  # the release is small
    command = parse_command(workplace.arguments(tmp_path, "--batch_seconds=auto"))
    assert find_batch_seconds(*command)["batch_seconds"] == 60.0


def test_steps_are_tried_until_memory_ends(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = ProbeBatches(planned)
    fitting = find_fitting_on_gpu(planned, batches, max_seconds=9, free_bytes=79 << 40)
    assert fitting.seconds == 9
    assert re.fullmatch(r"peak \d+\.\d of 80896\.0 GiB", fitting.reason)

    def out_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(RealSteps, "run_step", out_of_memory)
    with pytest.raises(DeviceError, match="A step with only the longest utterance"):
        find_fitting_on_gpu(planned, batches, max_seconds=9, free_bytes=1 << 50)


def test_resumed_run_keeps_its_batch_seconds(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--batch_seconds=auto", "--average_checkpoints=1")
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1", *options) == 0
    chosen = re.search(r"^batch_seconds: auto -> (\d+) \(", capsys.readouterr().out, re.M)
    assert chosen is not None
    declared = read_json(tmp_path / "run" / "run_config.json")["values"]["batch_seconds"]
    assert declared == float(chosen[1])
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=2", *options) == 0
    assert f"batch_seconds: auto -> {chosen[1]}, as the run started" in capsys.readouterr().out

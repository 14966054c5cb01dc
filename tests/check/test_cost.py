"""Real steps measure what a run takes, and leave nothing."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from docs.reference import CHECK_FIELDS, compare_fields
from sbkit.audio import segments
from sbkit.check import cost
from sbkit.check.check import check_run
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.check.cost import RealSteps, check_cost, check_recordings, measure_cost, real_steps
from sbkit.data.batch import Batch
from sbkit.data.sampler import RankSampler
from tests.calls import note_calls
from tests.check.harness import checked_run
from tests.runs import ROOT, Workplace


@pytest.fixture
def run(workplace: Workplace, tmp_path: Path) -> Iterator[CheckedRun]:
    with checked_run(workplace, tmp_path / "run", "--number_of_epochs=3") as run:
        yield run


def cost_findings(run: CheckedRun) -> list[Finding]:
    checks = [check_recordings, check_cost]
    return check_run(run.spec, data=run.data, checks=checks).findings


@pytest.mark.slow
def test_measured_steps_are_real_and_leave_no_trace(run: CheckedRun) -> None:
    random_state, sampler = torch.get_rng_state(), cast(RankSampler, run.sampler)
    with real_steps(run) as steps:
        steps.run_step(steps.load(next(iter(sampler))))
        assert steps.brain.optimizer_step == 3  # after two of the dry run
    measured = measure_cost(run, sampler)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not run.spec.folder.exists()
    weights = 4 * measured.parameters
    assert 3 * weights <= measured.checkpoint_bytes < 3.2 * weights  # with Adam's two moments
    assert measured.run_seconds == pytest.approx(3 * measured.epoch_seconds, rel=0.05)
    assert measured.peak_bytes > weights
    assert measured.fp32_step_seconds is None  # the run is in fp32


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("all tensors on one device"), "raised RuntimeError (all tensors on one dev"),
        (torch.OutOfMemoryError("CUDA out of memory."), "raise `grad_accumulation_factor"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "raise `grad_accumulation_f"),
    ],
)
def test_step_that_fails_only_on_the_device_is_found(
    run: CheckedRun, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """For example because a tensor of a part stays on the CPU."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cost, "take_step", fail)
    (finding,) = cost_findings(run)
    assert finding.stops
    assert text in str(finding)


@pytest.mark.slow
def test_recording_that_is_evaluated_whole_is_named_and_not_measured(
    run: CheckedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a test set, which is decoded whole; those of dev are greedily."""
    evaluated = note_calls(monkeypatch, RealSteps, "evaluate", lambda _, batch: batch.ids)
    monkeypatch.setattr(segments, "MAX_SEGMENT_SECONDS", 0.8)
    monkeypatch.setattr(segments, "OVERLAP_SECONDS", 0.4)
    spec = run.spec.with_overrides(eval_batch_seconds=1.0)  # every clip is longer
    (finding,) = cost_findings(replace(run, data=replace(run.data, spec=spec)))
    ids = run.data.splits.test["test"]["id"][:]
    assert "test has 4 recordings longer than `eval_batch_seconds`" in finding.problem
    assert "sbkit segment" in finding.fix
    assert (sorted(finding.ids), finding.stops) == (sorted(ids), False)
    assert evaluated and not {*chain(*evaluated)} & {*ids}


@pytest.mark.slow
def test_batch_that_does_not_fit_is_found(run: CheckedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill the run for it."""
    monkeypatch.setattr(cost, "available_memory", lambda: 1)
    (finding,) = cost_findings(run)
    assert "does not fit into memory. Lower `batch_seconds`" in finding.problem


@pytest.mark.slow
def test_reduced_precision_that_slows_the_steps_is_noted(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_step(steps: RealSteps, batch: Batch) -> float:
        with steps.brain.training_ctx:
            step_seconds = seconds["bf16" if torch.is_autocast_enabled("cpu") else "fp32"]
        if step_seconds is None:
            raise torch.OutOfMemoryError
        return step_seconds

    monkeypatch.setattr(RealSteps, "run_step", take_step)
    note = "On this CPU, the largest step takes 2.0 s in bf16, and 0.13 s in fp32"
    with checked_run(workplace, tmp_path / "run", "--precision=bf16") as run:
        for fp32_seconds, notes in ((0.13, [note]), (2.0, []), (3.0, []), (None, [])):
            seconds = {"bf16": 2.0, "fp32": fp32_seconds}
            findings = list(check_cost(run))
            assert [finding.problem for finding in findings] == notes
            assert all((f.where, f.stops) == ("override of precision", False) for f in findings)
            assert run.cost and run.cost.fp32_step_seconds == fp32_seconds


@pytest.mark.slow
def test_full_disk_is_found(run: CheckedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (finding,) = check_cost(run)
    assert (finding.where, finding.stops) == (run.spec.place("output_folder"), True)
    assert "0.0 MB are free" in finding.problem


@pytest.mark.slow
def test_check_command_prints_the_cost_unless_another_machine_is_meant(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = ROOT / "hparams/ctc.yaml"
    arguments = workplace.arguments(tmp_path / "run", "--concat_prob=0.0", yaml=yaml)
    assert workplace.sbkit("check", "--json", *arguments) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert workplace.sbkit("check", *arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"peak memory +[\d.,]+ MB of [\d.,]+ MB\n", printed)
    assert re.search(r"seconds per epoch +about [\d.]+, from the measured step\n", printed)
    assert re.search(r"hours of training +about [\d.]+\n", printed)
    assert re.search(r"disk space for 13 checkpoints +[\d.]+ MB\n", printed)
    assert workplace.sbkit("check", "--target=cuda:2", *arguments) == 0
    assert capsys.readouterr().out == "Nothing found.\n"
    assert record["findings"] == []
    unknown, missing = compare_fields(CHECK_FIELDS, [record])
    assert unknown == {"findings"} and all(name.startswith("findings.") for name in missing)
    assert record["cost"]["run_seconds"] > record["cost"]["epoch_seconds"] > 0


def test_peak_memory_does_not_count_earlier_checks(run: CheckedRun) -> None:
    with real_steps(run) as steps:
        before = steps.peak_bytes
        bytearray(b"x") * (500 << 20)
        assert steps.peak_bytes - before > 400 << 20
        steps.reset_peak()
        assert steps.peak_bytes - before < 100 << 20

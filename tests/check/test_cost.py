"""What a run takes is measured by real steps, which leave nothing behind."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.asr.recipe import ASR
from sbkit.check import cost
from sbkit.check.check import check_planned_run
from sbkit.check.cost import RealSteps, check_cost, measure_cost, real_steps
from sbkit.check.planned_run import PlannedRun
from sbkit.commands.cli import run
from sbkit.config.hparams import parse_command
from sbkit.distributed.device import resolve
from tests.check.harness import healthy_workplace
from tests.runs import ROOT, Workplace, one_thread


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture
def planned(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlannedRun]:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    command = parse_command(workplace.arguments(tmp_path / "run", "--number_of_epochs=3"))
    with one_thread(), PlannedRun(*command, recipe=ASR) as made:
        yield made


def test_the_steps_are_real_and_leave_no_trace(planned: PlannedRun) -> None:
    planned.results["placement"] = resolve("cpu", "bf16")
    state, before = (
        torch.get_rng_state(),
        [each.clone() for each in planned.require_model().parameters()],
    )
    with real_steps(planned) as steps:
        steps.take(steps.load(next(iter(planned.make_loaders().train.batch_sampler or ()))))
        after = list(steps.brain.modules.parameters())
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    taken = measure_cost(planned)
    assert all(
        torch.equal(*pair)
        for pair in zip(before, planned.require_model().parameters(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not planned.run_folder.exists()
    weights = 4 * taken.parameters
    assert 3 * weights <= taken.checkpoint_bytes < 3.2 * weights  # with Adam's two moments
    assert taken.seconds_of_run == pytest.approx(3 * taken.seconds_per_epoch, rel=0.05)
    assert taken.peak_bytes > weights


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("all tensors on one device"), "raised RuntimeError (all tensors on one dev"),
        (torch.OutOfMemoryError("CUDA out of memory."), "raise --grad_accumulation_factor"),
    ],
)
def test_a_step_that_fails_on_the_device_is_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """As where a tensor of a part stays on the CPU, which only the run's own device shows."""

    def fail(*_: object) -> None:
        raise error

    planned.make_cpu_brain()
    monkeypatch.setattr(cost, "training_loss", fail)
    (finding,) = check_planned_run(planned, [check_cost])
    assert finding.stops
    assert said in str(finding)


def test_a_full_disk_is_found(planned: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealSteps, "take", lambda *_: 1.0)
    assert list(check_cost(planned)) == []
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (disk,) = check_cost(planned)
    assert (disk.where, disk.stops) == (planned.place("output_folder"), True)


def test_the_command_prints_it_unless_another_machine_is_meant(
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
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert run(["check", *arguments]) == 0
        shown = capsys.readouterr().out
        assert "memory at its peak" in shown
        assert re.search(r"seconds per epoch +about [\d.]+, of the measured step\n", shown)
        assert re.search(r"hours of all epochs +about [\d.]+\n", shown)
        assert re.search(r"disk of the run, 12 checkpoints +[\d.]+ MB\n", shown)
        assert run(["check", "--target=cuda:2", *arguments]) == 0
        assert capsys.readouterr().out == "Nothing found.\n"
    assert told["findings"] == []
    assert told["cost"]["seconds_of_run"] > told["cost"]["seconds_per_epoch"] > 0

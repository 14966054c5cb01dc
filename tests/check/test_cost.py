"""What a run takes is measured by real steps, which leave nothing behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.asr.recipe import ASR
from sbkit.check import cost
from sbkit.check.check import check_planned_run
from sbkit.check.cost import RealSteps, brain_in_place, check_cost, measure_cost
from sbkit.check.planned_run import PlannedRun
from sbkit.cli import run
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_steps_are_real_and_leave_no_trace(planned: PlannedRun, precision: str) -> None:
    planned.parts["placement"] = resolve("cpu", precision)
    model, state = planned.brain.modules, torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    taken = measure_cost(planned)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not (planned.run_folder or Path()).exists()
    assert planned.brain.precision == "fp32"
    weights = 4 * taken.parameters
    assert 3 * weights <= (taken.checkpoint_bytes or 0) < 3.2 * weights  # with Adam's two moments
    assert taken.seconds_of_run == pytest.approx(3 * (taken.seconds_per_epoch or 0), rel=0.01)
    assert (taken.peak_bytes or 0) > weights


def test_a_step_updates_the_model(planned: PlannedRun) -> None:
    with brain_in_place(planned) as brain:
        before = [each.detach().clone() for each in brain.modules.parameters()]
        loader = planned.loaders.train
        RealSteps(brain, loader).take(next(iter(loader.batch_sampler)))
        after = list(brain.modules.parameters())
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_step_that_fails_on_the_device_is_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a tensor of a part stays on the CPU, which only the run's own device shows."""

    def fail(*_: object) -> None:
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(cost, "training_loss", fail)
    (finding,) = check_planned_run(planned, [check_cost])
    assert (finding.where, finding.stops) == (planned.place("model"), True)
    assert "raised RuntimeError (Expected all tensors to be on the same device" in finding.effect


def test_a_full_disk_and_a_full_memory_are_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(RealSteps, "take", out_of_memory)
        (memory,) = check_cost(planned)
    assert (memory.where, memory.stops) == (planned.place("batch_seconds"), True)
    assert "the largest does not (CUDA out of memory)" in memory.effect
    assert list(check_cost(planned)) == []
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (disk,) = check_cost(planned)
    assert (disk.where, disk.stops) == (planned.place("output_folder"), True)


def test_the_command_prints_it(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.chdir(ROOT)
    arguments = workplace.arguments(tmp_path / "run")
    with one_thread():
        assert run(["check", "--json", *arguments]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert run(["check", "--target=cuda:2", *arguments, "--batch_seconds=60"]) == 0
    assert told["findings"] == []
    assert told["cost"]["seconds_of_run"] > told["cost"]["seconds_per_epoch"] > 0
    assert "memory at its peak                  not measured" in capsys.readouterr().out

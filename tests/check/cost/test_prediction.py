"""The parts of a prediction: lines through probes, the weight of tensors, the room on a disk."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from recipes.asr.recipe import ASR
from sbkit.check.check import check_planned_run
from sbkit.check.cost import prediction as cost
from sbkit.check.cost.prediction import as_table, check_cost, predict
from sbkit.check.cost.probe import LinearCost, fit, probes, size_of
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.cli import run
from sbkit.config.hparams import parse_command
from sbkit.data.batches.plan import Example
from sbkit.distributed.device import resolve
from sbkit.train.memory import MemoryTracker, measure_memory
from tests.check.harness import healthy_workplace
from tests.runs import ROOT, Workplace, one_thread

SIZES = [(1, 2.0), (4, 1.0), (2, 8.0), (8, 4.0)]


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture
def planned(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlannedRun]:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    command = parse_command(workplace.arguments(tmp_path / "run"))
    with one_thread(), PlannedRun(*command, recipe=ASR) as made:
        yield made


@pytest.mark.parametrize("terms", [(3.0, 2.0, 0.5), (0.0, 2.0, 0.0), (5.0, 0.0, 1.0)])
def test_a_line_is_found_again(terms: tuple[float, float, float]) -> None:
    costs = [terms[0] + count * (terms[1] * s + terms[2] * s**2) for count, s in SIZES]
    assert fit(SIZES, costs).terms == pytest.approx(terms, abs=1e-6)
    assert fit(SIZES, costs)([(3, 30.0)])[0] == pytest.approx(
        terms[0] + 3 * (terms[1] * 30 + terms[2] * 900)
    )


def test_a_line_has_no_negative_term() -> None:
    costs = [10 * count * s - 0.1 * count * s**2 for count, s in SIZES]
    assert min(fit(SIZES, costs).terms) >= 0


def test_probes_are_cut_to_their_audio() -> None:
    plan = [[Example((row,), 16_000 * seconds) for row in range(9)] for seconds in (1, 2, 5)]
    sizes = [size_of(batch) for batch in probes(plan, (0.0, 0.5, 1.0), 6.0)]
    assert sizes == [(6, 1.0), (3, 2.0), (1, 5.0)]


def test_a_parameter_without_elements_and_a_sparse_tensor_count() -> None:
    assert cost._part(torch.zeros(0, 3)).shape == (0, 3)
    with MemoryTracker([]) as memory:
        torch.zeros(1000).to_sparse()
    assert memory.peak >= 4000


def test_only_what_lives_has_weight() -> None:
    known = torch.zeros(1000)
    with MemoryTracker([known]) as weight:
        kept = known + 1
        view = kept.view(10, 100).t()
        _ = known * 2 + view.sum()  # 4000 bytes each, gone after the line but for the last
        known.mul_(2)
    assert weight.now == 2 * 4000
    assert 3 * 4000 <= weight.peak < 3 * 4000 + 100


def test_cuda_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    with measure_memory([], torch.device("cuda:1")) as weight:
        pass
    assert weight.peak == 250


def test_a_prediction_is_of_the_declared_precision(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, str]] = []
    measure = cost.measure_step_memory

    def noted(brain: Any, *arguments: Any) -> Any:
        measured.append((brain.precision, brain.eval_precision))
        return measure(brain, *arguments)

    monkeypatch.setattr(cost, "measure_step_memory", noted)
    single = predict(planned)
    planned.parts.pop(cost.NAME)
    planned.parts["placement"] = resolve("cpu", "bf16")
    planned.knobs["eval_precision"] = "bf16"
    half = predict(planned)
    assert measured == [("fp32", "fp32"), ("bf16", "bf16")]
    assert planned.brain.device == torch.device("cpu")
    assert half.model_bytes == single.model_bytes


def test_a_full_disk_and_a_full_memory_are_found(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_cost(planned)) == []
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(cost, "free_memory", lambda planned: 1000)
    disk, memory = check_cost(planned)
    assert (disk.where, disk.stops) == (planned.place("output_folder"), True)
    assert (memory.where, memory.stops) == (planned.place("batch_seconds"), False)


def test_a_prediction_leaves_no_trace(planned: PlannedRun) -> None:
    model, state = planned.brain.modules, torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prediction = predict(planned)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not (planned.run_folder or Path()).exists()
    assert not is_in_torch_dispatch_mode()
    assert prediction.optimizer_bytes == pytest.approx(2 * prediction.gradient_bytes, rel=0.01)
    assert "steps per epoch" in as_table(prediction)


def test_gradients_that_pile_up_are_counted_and_a_large_batch_of_validation(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = {1: 0.0, 2: 0.0, 3: 1e12}
    predictions = []
    for accumulation, size in evaluated.items():
        planned.parts.pop(cost.NAME, None)
        planned.knobs["grad_accumulation_factor"] = accumulation
        line = LinearCost((size, 0.0, 0.0))
        monkeypatch.setattr(cost, "measure_evaluation_memory", lambda *_, line=line: line)
        predictions.append(predict(planned))
    single, split, large = predictions
    assert split.activation_bytes <= single.activation_bytes
    assert split.steps_per_epoch == single.steps_per_epoch
    held = split.model_bytes + split.optimizer_bytes
    assert split.peak_bytes == held + split.gradient_bytes + split.activation_bytes
    assert large.peak_bytes == held + 1e12


def test_an_epoch_has_an_update_for_each_step_and_a_share_of_the_validation(
    planned: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (valid,) = planned.loaders.valid.values()
    monkeypatch.setattr(valid.batch_sampler, "_plan", [[Example((0,), 16_000)]] * 4)
    monkeypatch.setattr(valid.batch_sampler, "_own", range(4))
    planned.knobs["grad_accumulation_factor"] = 2
    monkeypatch.setattr(cost, "try_optimizer", lambda _: (0, 100.0))
    monkeypatch.setattr(cost, "count_processes", lambda _: 2)
    monkeypatch.setattr(cost, "time_steps", lambda *_: LinearCost((0.0, 0.0, 0.0)))
    monkeypatch.setattr(cost, "time_evaluation", lambda *_: LinearCost((1.0, 0.0, 0.0)))
    predicted = predict(planned)
    assert predicted.seconds_per_epoch == 100 * predicted.steps_per_epoch + 2


def test_without_data_nothing_is_predicted() -> None:
    recipe = replace(ASR, prepare_splits=lambda knobs: None)
    with PlannedRun(ROOT / "hparams" / "ctc.yaml", {}, recipe=recipe) as planned:
        check_planned_run(planned, [check_cost])
        with pytest.raises(MissingPartError):
            predict(planned)


def test_the_command_prints_it(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.chdir(ROOT)
    arguments = ["check", "--json", *workplace.arguments(tmp_path / "run")]
    with one_thread():
        assert run(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["findings"] == []
    assert told["prediction"]["steps_per_epoch"] > 0

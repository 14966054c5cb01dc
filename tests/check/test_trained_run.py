"""After a real run: it took what was predicted, and goes on from what it left."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.asr.recipe import ASR
from sbkit.check.check import check_planned_run
from sbkit.check.existing_run import check_run_folder
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.config.hparams import parse_command
from tests.check.harness import healthy_workplace
from tests.runs import Workplace, one_thread, read_json

pytestmark = pytest.mark.slow

OPTIONS = ("--number_of_epochs=2", "--average_checkpoints=2")


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, *OPTIONS) == 0
    return run


def check(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, run: Path, *options: str
) -> list[Finding]:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    command = parse_command(workplace.arguments(run, *OPTIONS, *options))
    with one_thread(), PlannedRun(*command, recipe=ASR) as planned:
        return check_planned_run(planned, [check_run_folder])


def test_prediction_stands_beside_outcome(trained: Path) -> None:
    cost: dict[str, dict[str, Any]] = read_json(trained / "summary.json")["cost"]
    predicted, taken = cost["prediction"], cost["outcome"]
    assert predicted == read_json(trained / "prediction.json")
    assert predicted["peak_bytes"] == pytest.approx(taken["peak_bytes"], rel=0.2)
    assert predicted["steps_per_epoch"] == pytest.approx(taken["steps_per_epoch"], rel=0.2)
    assert 0 < predicted["seconds_per_epoch"] < 100 * taken["seconds_per_epoch"]
    weights = next((trained / "checkpoints").glob("CKPT+*"))
    room = sum(file.stat().st_size for file in weights.iterdir())
    assert predicted["checkpoint_bytes"] == pytest.approx(room, rel=0.3)


def test_a_run_that_goes_on_as_it_began_is_healthy(
    workplace: Workplace, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file: file.stat().st_mtime_ns for file in trained.rglob("*")}
    assert check(workplace, monkeypatch, trained, "--number_of_epochs=3") == []
    assert {file: file.stat().st_mtime_ns for file in trained.rglob("*")} == before


def test_a_replaced_tokenizer_is_found(
    workplace: Workplace, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    model = (run / "tokenizer.model").read_bytes()
    swap = bytearray(model)
    first, second = model.index(b"\n\x01e") + 2, model.index(b"\n\x01t") + 2
    swap[first], swap[second] = swap[second], swap[first]  # the same letters under other ids
    (run / "tokenizer.model").write_bytes(swap)
    [finding] = check(workplace, monkeypatch, run)
    assert "is another one" in finding.effect
    assert finding.stops


@pytest.mark.parametrize(
    ("option", "stops"), [("--d_model=48", [False, True]), ("--lr=1.0", [False])]
)
def test_other_knobs_are_told(
    workplace: Workplace,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    stops: list[bool],
) -> None:
    findings = check(workplace, monkeypatch, trained, option)
    assert [each.stops for each in findings] == stops
    assert "1 knobs were others" in findings[0].effect

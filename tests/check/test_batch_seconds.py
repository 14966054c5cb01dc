"""`batch_seconds: auto` is the largest batch that fits, and the number that a run keeps."""

import re
from pathlib import Path

import pytest
import torch

from recipes.asr.recipe import ASR
from sbkit.base.errors import SbkitError
from sbkit.check.batch_seconds import Batches, find_batch_seconds, largest_fitting, try_steps
from sbkit.check.cost import RealSteps
from sbkit.check.planned_run import PlannedRun
from sbkit.config.hparams import parse_command
from tests.check.harness import healthy_workplace
from tests.runs import ROOT, Workplace, one_thread, read_json

YAML = ROOT / "hparams" / "ctc.yaml"
ROOM = 1000  # bytes that are free, of which 900 may be taken


@pytest.mark.parametrize(
    ("held", "ends", "most", "found"),
    [
        (100, 9999, 5000, 374),  # two bytes a second: the last tenth is not tried
        (100, 9999, 60, 60),
        (100, 9999, 20, 31),  # never less than the longest utterance
        (100, 200, 5000, 124),  # memory ends before its line says so
        (100, 30, 5000, None),
    ],
)
def test_batches_grow_while_they_fit(held: int, ends: int, most: float, found: int | None) -> None:
    def peak_of(seconds: int) -> int | None:
        return held + 2 * seconds if seconds <= ends else None

    fitting = largest_fitting(peak_of, least=31, most=most, free=ROOM)
    assert (fitting and fitting.seconds) == found


def test_what_is_taken_is_said() -> None:
    fitting = largest_fitting(lambda _: 61 << 30, least=31, most=31, free=79 << 30)
    assert fitting is not None
    assert fitting.reason == "peak 61.0 of 79.0 GiB"


def test_a_number_stays_and_another_machine_is_not_tried() -> None:
    assert find_batch_seconds(YAML, {"batch_seconds": 40}) == {"batch_seconds": 40}
    with pytest.raises(SbkitError, match="must be a number where --target is another machine"):
        find_batch_seconds(YAML, {"batch_seconds": "auto"}, target="cuda:8")


def test_a_run_that_cannot_be_built_is_left_to_the_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"batch_seconds": "auto", "data_folder": str(tmp_path), "output_folder": "none"}
    assert find_batch_seconds(YAML, overrides) == overrides | {"batch_seconds": 60.0}
    assert "batch_seconds: auto -> 60 (no step can be tried: see the errors of " in caplog.text


def test_steps_are_tried_until_memory_ends(
    asterisk_english: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    workplace = healthy_workplace(asterisk_english, tmp_path / "workplace")
    command = parse_command(workplace.arguments(tmp_path / "run"))
    with one_thread(), PlannedRun(*command, recipe=ASR) as planned:
        batches = Batches(planned)
        found = try_steps(planned, batches, most=9, free=1 << 50)
        assert found.seconds == 9

        def out_of_memory(*_: object) -> float:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(RealSteps, "take", out_of_memory)
        with pytest.raises(SbkitError, match="must be at least the longest utterance"):
            try_steps(planned, batches, most=9, free=1 << 50)


def test_a_run_keeps_the_number_that_it_began_with(
    asterisk_english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace: Workplace = healthy_workplace(asterisk_english, tmp_path / "workplace")
    options = ("--batch_seconds=auto", "--check=False", "--average_checkpoints=1")
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1", *options) == 0
    said = re.search(r"^batch_seconds: auto -> (\d+) \(", capsys.readouterr().out, re.M)
    assert said is not None
    declared = read_json(tmp_path / "run" / "run_config.json")["values"]["batch_seconds"]
    assert declared == float(said[1])
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=2", *options) == 0
    assert f"batch_seconds: auto -> {said[1]}, as the run began" in capsys.readouterr().out

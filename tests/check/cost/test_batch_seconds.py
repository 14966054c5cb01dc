"""`batch_seconds: auto` is the largest batch that fits, and the number that a run keeps."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sbkit.base.errors import SbkitError
from sbkit.check.cost import batch_seconds
from sbkit.check.cost.batch_seconds import FittingBatch, settle
from sbkit.config.hparams import parse_command
from tests.check.harness import healthy_workplace
from tests.runs import ROOT, Workplace, read_json

YAML = ROOT / "hparams" / "ctc.yaml"
ROOM = 1000  # bytes that are free


class Trial:
    """Steps that take two bytes for a second, in memory that ends at a number of seconds."""

    longest, total, held = 30.5, 20_000.0, 100

    def __init__(self, estimated: float, ends: float = torch.inf) -> None:
        self.estimated, self.ends, self.tried = estimated, ends, list[float]()

    def estimate(self, room: int) -> float:
        return self.estimated

    def peak(self, seconds: float) -> int:
        self.tried.append(seconds)
        if seconds > self.ends:
            raise torch.OutOfMemoryError("pretended")
        return self.held + int(2 * seconds)

    def refuse(self, free: int) -> None:
        raise SbkitError("the longest does not fit")


FOUND = [  # what a line estimates, where memory ends, what is tried, what is found
    (390.0, torch.inf, [390], FittingBatch(390, 880, ROOM)),
    (500.0, torch.inf, [450], None),
    (390.0, 300.0, [390, 312, 249], FittingBatch(249, 598, ROOM)),
    (390.0, 31.0, [390, 312, 249, 199, 159, 127, 101, 80, 64, 51, 40, 32, 31], None),
    (3.0, torch.inf, [31], FittingBatch(31, 162, ROOM)),
]


@pytest.mark.parametrize(("estimated", "ends", "tried", "found"), FOUND)
def test_smaller_batches_are_tried_until_one_fits(
    estimated: float, ends: float, tried: list[int], found: FittingBatch | None
) -> None:
    trial: Any = Trial(estimated, ends)
    assert batch_seconds._try(trial, ROOM, 450.0, "why") == (
        found or FittingBatch(trial.tried[-1], trial.peak(trial.tried[-1]), ROOM, "")
    )
    assert trial.tried[: len(tried)] == tried


def test_an_utterance_that_does_not_fit_is_refused() -> None:
    trial: Any = Trial(390.0, 30.0)
    with pytest.raises(SbkitError, match="the longest does not fit"):
        batch_seconds._try(trial, ROOM, 450.0, "why")


def test_what_limits_a_batch_is_said() -> None:
    trial: Any = Trial(390.0)
    assert batch_seconds._limit(trial, "cuda", 1) == (1000.0, "the epoch has 20 steps at least")
    assert batch_seconds._limit(trial, "cuda", 8)[0] == 125.0
    assert batch_seconds._limit(trial, "cpu", 1) == (60.0, "more is not faster on the CPU")
    found = batch_seconds._try(trial, ROOM, 60.0, "why")
    assert found == FittingBatch(60, 220, ROOM, "why")
    assert FittingBatch(480, 61 << 30, 79 << 30).describe() == "peak 61.0 of 79.0 GiB"


def test_a_number_stays_and_another_machine_is_not_tried() -> None:
    assert settle(YAML, {"batch_seconds": 40}) == {"batch_seconds": 40}
    with pytest.raises(SbkitError, match="must be a number where --target is another machine"):
        settle(YAML, {"batch_seconds": "auto"}, target="cuda:8")


def test_no_other_word_and_no_other_knob_is_automatic() -> None:
    for option in ("--batch_seconds=most", "--lr=auto", "--d_model=auto"):
        with pytest.raises(SbkitError, match=r"must be a (whole )?number"):
            settle(*parse_command([str(YAML), option]))


def test_a_run_that_cannot_be_built_is_left_to_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = {"batch_seconds": "auto", "data_folder": str(tmp_path), "output_folder": "none"}
    assert settle(YAML, overrides) == overrides | {"batch_seconds": 60.0}
    said = capsys.readouterr().out
    assert said.startswith("batch_seconds: auto -> 60 (no step can be tried: see the errors of ")


def test_batches_that_cannot_be_planned_are_left_to_the_check(
    asterisk_english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace: Workplace = healthy_workplace(asterisk_english, tmp_path / "workplace")
    assert workplace.train_here(tmp_path / "run", "--batch_seconds=auto", "--speeds=[0.0]") == 2
    assert "`speeds` must be a list of one or more positive numbers" in capsys.readouterr().err


def test_a_run_keeps_the_number_that_it_began_with(
    asterisk_english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace: Workplace = healthy_workplace(asterisk_english, tmp_path / "workplace")
    options = ("--batch_seconds=auto", "--check=False", "--average_checkpoints=1")
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1", *options) == 0
    said = re.search(
        r"^batch_seconds: auto -> (\d+) \(peak \d+\.\d of ", capsys.readouterr().out, re.M
    )
    assert said is not None
    declared = read_json(tmp_path / "run" / "declaration.json")["values"]["batch_seconds"]
    assert declared == float(said[1])
    batch_seconds.LEAST_STEPS, before = 3, batch_seconds.LEAST_STEPS  # it would find more now
    try:
        assert workplace.train_here(tmp_path / "run", "--number_of_epochs=2", *options) == 0
    finally:
        batch_seconds.LEAST_STEPS = before
    assert f"batch_seconds: auto -> {said[1]}, as the run began" in capsys.readouterr().out

"""A run shows the progress of every phase; the time left includes what follows training."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbkit.logs import progress
from sbkit.train.evaluation import EvaluationHooks, seconds_after_training
from tests.runs import Workplace


class Recipe(EvaluationHooks):
    """A Brain whose own work after training takes as long as its test sets are large."""

    def seconds_after_training(self, test_share: float) -> float:
        return 100 * test_share


LOADERS: Any = SimpleNamespace(valid={"dev": range(4)}, test={"a": range(1), "b": range(1)})


@pytest.mark.parametrize(
    ("loaders", "num_averaged", "seconds"),
    [
        (LOADERS, 10, (4 + 0.5) * 6 + 50),  # means of 10, 5, 2 and 1 checkpoints are validated
        (LOADERS, 1, 0.5 * 6 + 50),
        (None, 10, 0.0),  # it is unknown whether a test follows `fit`
    ],
)
def test_seconds_after_training_count_averaging_fitting_and_testing(
    loaders: Any, num_averaged: int, seconds: float
) -> None:
    estimate = seconds_after_training(Recipe(), loaders, num_averaged=num_averaged, validation=6.0)
    assert estimate == seconds


def test_run_shows_progress_of_every_phase(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)  # at every step
    fresh, more = Workplace(workplace.release, tmp_path / "cache"), ("--log_every=1",)
    epochs = "--number_of_epochs=2"
    assert fresh.train_here(tmp_path / "run", epochs, "--average_checkpoints=2", *more) == 0
    out = capsys.readouterr().out
    ends = [line.partition(": 100 % done, about 0:00:00 left") for line in out.splitlines()]
    assert list(dict.fromkeys(title for title, end, _ in ends if end)) == [
        *("Decoding train", "Decoding dev", "Decoding test", "checking the run"),
        *("measuring features", "validating", "averaging checkpoints"),
        *("encoding the validation sets", "fitting the confidence of words", "scoring test"),
        "writing clips",
    ]
    steps = [line for line in out.splitlines() if " lr " in line]
    first, *others = (line for line in steps if line.startswith("epoch 1/2"))
    assert not first.endswith("left")
    assert all(re.search(r" > \d:\d\d:\d\d left$", line) for line in others)
    others = [line for line in out.splitlines() if line.startswith("epoch 2/2")]
    assert all(re.search(r"% \d:\d\d:\d\d left$|RTFx \d:\d\d:\d\d left$", line) for line in others)

"""As many of the best checkpoints are averaged as make validation best, in export too."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbkit.checkpoint.checkpointer import RANKED_BY, Checkpointer
from tests.checkpoint.saves import checkpointer, line, save

KEYS = {"min_key": "CER"}


class Scored:
    """A checkpointer over one model, whose error is a function of its weight."""

    def __init__(self, folder: Path, error: Callable[[float], float]) -> None:
        self.model = line(-1.0)
        self.checkpointer = checkpointer(folder, self.model)
        self.asked: list[float] = []
        self._error = error

    def score(self) -> float:
        self.asked.append(self.weight)
        return self._error(self.weight)

    @property
    def weight(self) -> float:
        return round(float(self.model.bias[0].detach()), 4)

    def load(self, count: int) -> int:
        averaged = self.checkpointer.load_average(count, self.score, **KEYS)
        assert averaged is not None
        return len(averaged.checkpoints)


@pytest.mark.parametrize(
    ("meta", "best"),
    [
        ([{"TER": 3, RANKED_BY: {"min_key": "TER"}}, {"TER": 2, RANKED_BY: {"min_key": "TER"}}], 1),
        ([{"F1": 3, RANKED_BY: {"max_key": "F1"}}, {"F1": 2, RANKED_BY: {"max_key": "F1"}}], 0),
    ],
)
def test_the_best_is_found_by_the_metric_that_ranked_it(
    tmp_path: Path, meta: list[dict[str, Any]], best: int
) -> None:
    for number, each in enumerate(meta):
        checkpointer(tmp_path, line(float(number))).save_checkpoint(meta=each)
    (found,) = Checkpointer(tmp_path).find_averaged()
    assert meta[best].items() <= found.meta.items()


@pytest.mark.parametrize(
    ("best_weight", "chosen", "weight"),
    [
        (0.1, 1, 0.1),  # the best alone: the others only spoil it
        (0.15, 2, 0.15),  # the mean of two
        (0.3, 4, 0.25),  # all of them
    ],
)
def test_as_many_are_averaged_as_make_validation_best(
    tmp_path: Path, best_weight: float, chosen: int, weight: float
) -> None:
    save(tmp_path, 0.4, 0.1, 0.2, 0.3)
    scored = Scored(tmp_path, lambda value: abs(value - best_weight))
    assert scored.load(4) == chosen
    assert scored.weight == weight
    assert scored.asked == [0.25, 0.15, 0.1]  # of four, of two, of one
    # Whoever exports or tests again takes the same, and scores nothing.
    found = Checkpointer(tmp_path).find_averaged(**KEYS)
    assert [each.meta["CER"] for each in found] == [0.1, 0.2, 0.3, 0.4][:chosen]
    again = Scored(tmp_path, lambda _: math.nan)
    assert (again.load(4), again.weight, again.asked) == (chosen, weight, [])


def test_what_cannot_be_scored_leaves_the_best_alone(tmp_path: Path) -> None:
    save(tmp_path, 0.4, 0.1)
    scored = Scored(tmp_path, lambda _: math.nan)
    assert (scored.load(2), scored.weight) == (1, 0.1)


def test_more_training_makes_another_choice(tmp_path: Path) -> None:
    save(tmp_path, 0.4, 0.1)
    assert Scored(tmp_path, lambda _: 1.0).load(2) == 2  # of equal ones the most are averaged
    save(tmp_path, 0.2)
    assert [each.meta["CER"] for each in Checkpointer(tmp_path).find_averaged(**KEYS)] == [0.1]
    scored = Scored(tmp_path, lambda value: abs(value - 0.15))
    assert (scored.load(2), scored.weight) == (2, 0.15)
    save(tmp_path, 0.05)
    scored = Scored(tmp_path, lambda value: abs(value - 0.05))
    assert (scored.load(2), scored.weight) == (1, 0.05)

"""What is left of a run includes what follows its last epoch."""

from types import SimpleNamespace
from typing import Any

from sbkit.train.evaluation import _seconds_of_ending
from sbkit.train.scoring import Scoring


class Recipe(Scoring):
    """A Brain whose own work after training is as long as its test sets are large."""

    loaders: Any = SimpleNamespace(valid={"dev": range(4)}, test={"a": range(1), "b": range(1)})

    def seconds_of_ending(self, test_share: float) -> float:
        return 100 * test_share

    def _declared(self, name: str, default: Any) -> Any:
        return {"average_checkpoints": 10}.get(name, default)


def test_averaging_fitting_and_testing_are_counted() -> None:
    """Means of 10, 5, 2 and 1 checkpoints are validated, and the test is half a validation."""
    assert _seconds_of_ending(Recipe(), 6.0) == (4 + 0.5) * 6 + 50


def test_what_follows_a_fit_of_ones_own_is_not_known() -> None:
    brain = Recipe()
    brain.loaders = None
    assert _seconds_of_ending(brain, 6.0) == 0

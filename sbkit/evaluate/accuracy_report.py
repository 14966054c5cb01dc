"""The accuracy of a classifier on a test set, with its 95 % interval."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sbkit.evaluate.interval import Interval, rate_interval, units_of
from sbkit.logs.metric import Metric, Metrics

ACCURACY: Metrics = {"accuracy": Metric(lower_is_better=False)}


class Answer(NamedTuple):
    """One utterance: its class, and the one that was found; ``speaker`` is "" where unknown."""

    id: str
    right: str
    found: str
    speaker: str = ""


def count_right(answers: Sequence[Answer]) -> int:
    """Count the right answers."""
    return sum(each.right == each.found for each in answers)


def accuracy(answers: Sequence[Answer]) -> float:
    """Divide the right answers by all; 0 of none."""
    return count_right(answers) / max(1, len(answers))


def accuracy_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the accuracy of a split with its counts and its 95 % interval."""
    return {
        "accuracy": accuracy(answers),
        "right": count_right(answers),
        "utterances": len(answers),
        "accuracy_interval": _interval(answers).plain(),
    }


def describe_accuracy(answers: Sequence[Answer]) -> str:
    """Write the accuracy with its counts and 95 % interval, for the screen."""
    return (
        f"accuracy {100 * accuracy(answers):.1f} % ({count_right(answers)} / {len(answers)}; "
        f"{_interval(answers)})"
    )


def _interval(answers: Sequence[Answer]) -> Interval:
    units = units_of([each.id for each in answers], [each.speaker for each in answers])
    right = np.array([each.right == each.found for each in answers], dtype=np.int64)
    return rate_interval(right, np.ones_like(right), units)

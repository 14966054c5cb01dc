"""The accuracy of a classifier on a test set, with its 95 % interval."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from sbkit.evaluate.interval import Interval, rate_interval, units_of


class Answer(NamedTuple):
    """One utterance: its class, and the one that was found; ``speaker`` is "" where unknown."""

    id: str
    right: str
    found: str
    speaker: str = ""


def accuracy(answers: Sequence[Answer]) -> float:
    """Divide the right answers by all; 0 of none."""
    return sum(each.right == each.found for each in answers) / max(1, len(answers))


def accuracy_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the accuracy of a split with its counts and its 95 % interval."""
    units = units_of([each.id for each in answers], [each.speaker for each in answers])
    right = np.array([each.right == each.found for each in answers], dtype=np.int64)
    return {
        "accuracy": accuracy(answers),
        "right": int(right.sum()),
        "utterances": len(answers),
        "accuracy_interval": asdict(rate_interval(right, np.ones_like(right), units)),
    }


def describe_accuracy(answers: Sequence[Answer]) -> str:
    """Write the accuracy with its counts and 95 % interval, for the screen."""
    figures = accuracy_figures(answers)
    counts = f"{figures['right']} / {figures['utterances']}"
    interval = Interval(**figures["accuracy_interval"])
    return f"accuracy {100 * figures['accuracy']:.1f} % ({counts}; {interval})"

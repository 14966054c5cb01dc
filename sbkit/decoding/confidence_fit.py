"""Fit the confidence of words to a validation set, and measure it by cross-validation.

features of words, right or not -> logistic regression -> calibration by cross-validation

Legend: N words, K features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.decoding.confidence import FEATURES, Confidence, Floats
from sbkit.decoding.word_aligner import WordFeatures
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import right_words

FEWEST = 20  # right words, and wrong ones; with so few, NCE on other clips was 0.17 at worst
FOLDS = 10
PRIOR = 1.0  # a weight of a standardized feature is normally distributed with this precision
SMALLEST_SCALE = 1e-2  # standard deviation of a feature that is used
STEPS = 100
LONGEST_STEP = 5.0  # Newton's method might leave the region where a step makes it better
SMALLEST_STEP = 1e-9

Bools = npt.NDArray[np.bool_]


class LabeledWords(NamedTuple):
    """The words of one utterance: its reference, features by name and whether each is right."""

    text: str
    features: dict[str, Floats]
    right: list[bool]


@dataclass(frozen=True)
class FittedConfidence:
    """A confidence, and its calibration on words that it was not fitted to.

    confidence: None where there are too few words, or where it tells no more than the share of
    right words does; calibration: by cross-validation over utterances, None where there was none.
    """

    confidence: Confidence | None
    calibration: Calibration | None
    words: int
    right: int

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        weights = None if self.confidence is None else self.confidence.plain()
        figures = {} if self.calibration is None else self.calibration.plain()
        return {"weights": weights, "words": self.words, "right": self.right, **figures}

    def __str__(self) -> str:
        """Write its calibration, or why there is none."""
        if self.confidence is not None:
            return f"{self.calibration}, by cross-validation"
        if self.calibration is None:
            needed = f"at least {FEWEST} right words and {FEWEST} wrong ones in two utterances"
            return f"none, since there must be {needed}, but {self.right} of {self.words} are right"
        return f"none, since it says too little of words it was not fitted to: {self.calibration}"


def label_words(words: WordFeatures, reference: str) -> LabeledWords:
    """Compare the decoded words of an utterance with its reference."""
    decoded = [word.text for word in words.words]
    return LabeledWords(reference, words.features, right_words(reference.split(), decoded))


def fit_confidence(labeled: Sequence[LabeledWords]) -> FittedConfidence:
    """Fit a confidence to words, whatever the order of the utterances.

    Nothing is chosen here: features and prior are fixed, and cross-validation only measures.
    """
    labeled = sorted((each for each in labeled if each.right), key=_order)
    right = np.array([each for every in labeled for each in every.right], np.bool_)
    counts = (len(right), int(right.sum()))
    if len(labeled) < 2 or min(counts[1], counts[0] - counts[1]) < FEWEST:
        return FittedConfidence(None, None, *counts)
    folds = np.array([place % FOLDS for place, each in enumerate(labeled) for _ in each.right])
    features = {
        name: np.concatenate([each.features[name] for each in labeled])
        for name in FEATURES
        if name in labeled[0].features
    }
    predicted = np.zeros(len(right))
    for fold in range(FOLDS):
        held = folds == fold
        rest = _fit({name: each[~held] for name, each in features.items()}, right[~held])
        predicted[held] = rest({name: each[held] for name, each in features.items()})
    calibration = measure_calibration(predicted.tolist(), right.tolist())
    nce = None if calibration is None else calibration.NCE
    useful = nce is not None and nce > 0
    return FittedConfidence(_fit(features, right) if useful else None, calibration, *counts)


def _order(labeled: LabeledWords) -> tuple[Any, ...]:
    return labeled.text, *(each.tolist() for each in labeled.features.values())


def _fit(features: dict[str, Floats], right: Bools) -> Confidence:
    """Standardize features, fit their weights, and express these for the features as they are.

    A feature that is all but the same for all words is left out.
    """
    used = {name: each for name, each in features.items() if each.std() > SMALLEST_SCALE}
    stacked = np.stack([*used.values()], 1) if used else np.zeros((len(right), 0))
    mean, scale = stacked.mean(0), stacked.std(0)
    bias, weights = fit_logistic((stacked - mean) / scale, right)
    weights = weights / scale
    return Confidence(
        round(float(bias - weights @ mean), 4),
        {name: round(weight, 4) for name, weight in zip(used, weights.tolist(), strict=True)},
    )


def fit_logistic(features: Floats, right: Bools, prior: float = PRIOR) -> tuple[float, Floats]:
    """Fit bias and weights of a logistic regression by Newton's method: (N, K), (N,) -> (K,).

    Iteratively reweighted least squares with a ridge: ``prior`` is the precision of a normal
    distribution of each weight, none of the bias (Bishop, 2006, "Pattern recognition and machine
    learning", 4.3.3 and 4.5.1).
    """
    inputs = np.concatenate([np.ones((len(features), 1)), features], 1)
    penalty = np.diag([1e-9, *[prior] * features.shape[1]])
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        probabilities = 1 / (1 + np.exp(-np.clip(inputs @ weights, -50, 50)))
        gradient = inputs.T @ (right - probabilities) - penalty @ weights
        curvature = (inputs.T * (probabilities * (1 - probabilities))) @ inputs + penalty
        step = np.linalg.solve(curvature, gradient)
        largest = np.abs(step).max()
        weights += step * min(1.0, LONGEST_STEP / max(largest, SMALLEST_STEP))
        if largest < SMALLEST_STEP:
            break
    return float(weights[0]), weights[1:]

"""The confidence of words: a logistic function of their features, fitted on a validation set.

Raw posteriors tell less than the share of right words does, so a confidence is fitted or absent.

Legend: U frames, V vocabulary, W words of an utterance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.decoding.alignment import TimedWord
from sbkit.decoding.frames import LogProbs
from sbkit.evaluate.wer import right_words
from sbkit.lm.ngram import UNKNOWN, NgramModel

Floats = npt.NDArray[np.float64]

CONFIDENCE_FILE = "confidence.json"  # in a run
GREEDY = "greedy"  # it has its own, as each kind of decoder has
OF_AUDIO = ("entropy", "posterior", "length", "agreement")
OF_LANGUAGE = ("known", "lm")
FEATURES = (*OF_AUDIO, *OF_LANGUAGE)
BIAS = "bias"
LARGEST_WEIGHT = 1e4
TSALLIS = 1 / 3  # order of the entropy: NeMo's, which is flatter than Shannon's
LEAST = 1e-3  # of probabilities whose odds are taken, and of confidences, which have 3 decimals


@dataclass(frozen=True)
class Confidence:
    """The logistic function: bias + sum of weight * feature are the log odds that a word is right.

    weights: of some of the FEATURES.
    """

    bias: float
    weights: Mapping[str, float]

    @classmethod
    def of(cls, values: object) -> Self:
        """Read it from plain data, {bias: ..., FEATURE: ...}; raise SbkitError otherwise."""
        given: dict[Any, Any] = dict(values) if isinstance(values, Mapping) else {}
        if BIAS not in given or not all(map(_is_weight, given, given.values())):
            raise SbkitError(
                f"A confidence must be numbers named {BIAS}, {', '.join(FEATURES)}, but is "
                f"{str(values)[:100]}. Fit it again: sbkit tune RUN"
            )
        weights = {name: float(value) for name, value in given.items() if name != BIAS}
        return cls(float(given[BIAS]), weights)

    def plain(self) -> dict[str, float]:
        """Return it as plain data."""
        return {BIAS: self.bias, **self.weights}

    def __call__(self, features: Mapping[str, Floats]) -> list[float]:
        """Return the probability that each word is right, 0.001 to 0.999: (W,) each -> W."""
        odds = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        probabilities = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
        words = len(features[OF_AUDIO[0]])
        clipped = np.broadcast_to(probabilities.clip(LEAST, 1 - LEAST), words)
        rounded: list[float] = clipped.round(3).tolist()
        return rounded


def _is_weight(name: object, value: object) -> bool:
    return (
        name in (BIAS, *FEATURES)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LARGEST_WEIGHT
    )


def features_of_audio(log_probs: LogProbs, words: Sequence[TimedWord]) -> dict[str, Floats]:
    """Compute the features of words from log-probabilities: (U, V), W words -> (W,) each.

    entropy: of the tokens of a frame (Tsallis, of order 1/3, 0 for a certain one and 1 where all
    are equally probable), the mean over the word's frames; after Laptev and Ginsburg (2022, arXiv
    2212.08703). posterior: log odds of the word's least probable token, each at its best frame.
    length: logarithm of its letters.
    """
    log_probs = log_probs.astype(np.float64)
    size = log_probs.shape[1]
    most = size ** (1 - TSALLIS) - 1
    entropies = (np.exp(TSALLIS * log_probs).sum(1) - 1) / most
    weakest = (
        min(log_probs[each.first : each.end, each.token].max() for each in word.tokens)
        for word in words
    )
    return {
        "entropy": np.array([entropies[word.first : word.end].mean() for word in words]),
        "posterior": _log_odds(np.exp(np.array([*weakest]))),
        "length": np.log([float(len(word.text)) for word in words]),
    }


def agreement(
    words: Sequence[str], others: Sequence[Sequence[str]], scores: Sequence[float]
) -> Floats:
    """Return the share of a beam, by its scores, that has each word in its place: -> (W,).

    others: the words of each hypothesis, aligned with those of the best; scores: natural
    logarithms. A beam of one agrees with itself.
    """
    if len(others) < 2:
        return np.ones(len(words))
    shares = np.exp(np.array(scores) - max(scores))
    merged = dict[tuple[str, ...], float]()  # hypotheses may differ in spaces alone
    for other, share in zip(others, (shares / shares.sum()).tolist(), strict=True):
        merged[tuple(other)] = merged.get(tuple(other), 0.0) + share
    agreed = np.zeros(len(words))
    for other, share in merged.items():
        agreed += share * np.array(right_words(other, words), np.float64)
    return agreed


def features_of_language(lm: NgramModel, words: Sequence[str]) -> dict[str, Floats]:
    """Compute whether a language model knows each word, and ln P(word | words before): -> (W,)."""
    ids, state = [lm.id_of(word) for word in words], lm.start
    log_probs = list[float]()
    for each in ids:
        log_prob, state = lm.score(state, each)
        log_probs.append(log_prob)
    known = np.array([float(each != UNKNOWN) for each in ids])
    return {"known": known, "lm": np.array(log_probs, np.float64)}


def _log_odds(probabilities: Floats) -> Floats:
    odds: Floats = np.log((probabilities + LEAST) / (1 - probabilities + LEAST))
    return odds

"""Whole texts: the probability that every word of one is right, and the errors to expect in it.

confidences of the words, beam -> features of the text -> probability that all of it is right
    -> expected errors

The product of the words' confidences is not that probability, because errors come together, and
words that are missing have no confidence. So a text has a logistic function of its own, fitted to a
validation set (`fit.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sbkit.base.arrays import Float64s
from sbkit.decoding.greedy import Hypothesis
from sbkit.decoding.words import MIN_PROBABILITY, Confidence
from sbkit.text.tokenizer import Tokenizer

UTTERANCES = "utterances"  # the key of its fit, beside the fit of the words
EXTRA_ERRORS = "extra_errors"
FEATURES = ("product", "share", "length")


@dataclass(frozen=True)
class UtteranceConfidence:
    """The fitted probability that a text is right, and its errors if it is not.

    extra_errors: how many errors a wrong text has beyond the first, for each word that is expected
        to be wrong. It counts missing words, too.
    """

    confidence: Confidence
    extra_errors: float

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Read plain data; raise KeyError, TypeError or ValueError if it is invalid."""
        confidence = Confidence.from_plain(values["weights"], FEATURES)
        return cls(confidence, float(values[EXTRA_ERRORS]))

    def __call__(
        self, word_confidences: Sequence[float], beam: Sequence[Hypothesis], tokenizer: Tokenizer
    ) -> tuple[float, float]:
        """Return the probability that the best text of a beam is right, and its expected errors."""
        features = utterance_features(word_confidences, text_share(beam, tokenizer))
        (confidence,) = self.confidence(features)
        return confidence, self.expected_errors(confidence, word_confidences)

    def expected_errors(self, confidence: float, word_confidences: Sequence[float]) -> float:
        """Return the expected edits between a text and its reference."""
        wrong_words = len(word_confidences) - sum(word_confidences)
        return round((1 - confidence) * (1 + self.extra_errors * wrong_words), 4)


def text_share(beam: Sequence[Hypothesis], tokenizer: Tokenizer) -> float:
    """Return the share of a beam's probability that has the words of its best hypothesis."""
    texts = [tokenizer.words(hypothesis.tokens) for hypothesis in beam]
    scores = np.array([hypothesis.score for hypothesis in beam])
    shares = np.exp(scores - scores.max())
    return float(shares[[text == texts[0] for text in texts]].sum() / shares.sum())


def utterance_features(word_confidences: Sequence[float], share: float) -> dict[str, Float64s]:
    """Return the features of a text with at least one word, (1,) each.

    product: the log odds of the product of the words' confidences.
    share: the log odds of its share of the beam.
    length: the logarithm of the number of words. The product is too low for long texts, in which
        the right words come together as well.
    """
    probabilities = np.array([np.prod(word_confidences), share])
    odds = (probabilities + MIN_PROBABILITY) / (1 - probabilities + MIN_PROBABILITY)
    values = [*np.log(odds), np.log(len(word_confidences))]
    return {name: np.array([value]) for name, value in zip(FEATURES, values, strict=True)}

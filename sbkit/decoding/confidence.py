"""The times and confidences of decoded words, the same in a run and in a bundle.

log-probabilities, tokens, beam -> alignment -> features of words -> confidences

A confidence is a logistic function of a word's features, fitted on a validation set or absent: raw
posteriors tell less than the share of right words does.

Legend: U frames, V vocabulary, W words of an utterance, N words of a set, K features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sbkit.base.units import samples_to_seconds
from sbkit.decoding.alignment import TimedWord, WordOffsets, frames_needed, time_words
from sbkit.decoding.frames import Hypothesis, LogProbs
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import right_words
from sbkit.lm.ngram import UNKNOWN, NgramModel
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CONFIDENCE_FILE = "confidence.json"  # in a run
GREEDY = "greedy"  # it has its own, as each kind of decoder has
FEATURES = ("entropy", "posterior", "length", "agreement", "known", "lm")
BIAS = "bias"
LARGEST_WEIGHT = 1e4
TSALLIS = 1 / 3  # order of the entropy: NeMo's, which is flatter than Shannon's
LEAST = 1e-3  # of probabilities whose odds are taken, and of confidences, which have 3 decimals

FEWEST = 20  # right words, and wrong ones; with so few, NCE on other clips was 0.17 at worst
FOLDS = 10
PRIOR = 1.0  # a weight of a standardized feature is normally distributed with this precision
SMALLEST_SCALE = 1e-2  # standard deviation of a feature that is used
STEPS = 50  # of Newton's method, which needs ten
LONGEST_STEP = 5.0  # Newton's method might leave the region where a step makes it better


@dataclass(frozen=True)
class Confidence:
    """The logistic function: bias + sum of weight * feature are the log odds that a word is right.

    weights: of some of the FEATURES.
    """

    bias: float
    weights: Mapping[str, float]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Read it from plain data, {bias: ..., FEATURE: ...}.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        weights = dict(values)
        is_bounded = all(abs(weight) <= LARGEST_WEIGHT for weight in weights.values())
        if not is_bounded or not weights.keys() <= {BIAS, *FEATURES}:
            raise ValueError(f"a weight is unknown or beyond {LARGEST_WEIGHT:g}")
        return cls(weights.pop(BIAS), weights)

    def plain(self) -> dict[str, float]:
        """Return it as plain data."""
        return {BIAS: self.bias, **self.weights}

    def __call__(self, features: Mapping[str, Floats]) -> list[float]:
        """Return the probability that each word is right, 0.001 to 0.999: (W,) each -> W."""
        odds = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        probabilities = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
        clipped = probabilities.clip(LEAST, 1 - LEAST)
        rounded: list[float] = np.broadcast_to(clipped, len(features["entropy"])).round(3).tolist()
        return rounded


@dataclass(frozen=True)
class WordFeatures:
    """The words of an utterance, and their features by name, (W,) each."""

    words: tuple[TimedWord, ...]
    features: dict[str, Floats]


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
        figures = {} if self.calibration is None else asdict(self.calibration)
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
        weights += step / max(1.0, np.abs(step).max() / LONGEST_STEP)
    return float(weights[0]), weights[1:]


# ---- words with times and confidences


@dataclass(frozen=True, kw_only=True)
class WordAligner:
    """Compute the times and confidences of the words of a text, from the frames of a whole clip.

    Attributes:
        samples_per_frame, sample_rate: from frames to seconds.
        offsets: how far words reach beyond the frames of their tokens.
        lm: a language model of words, None for none.
        confidence: None where there is none.
        unjudged: words without a confidence, since none like them were in what it was fitted on:
            hotwords.
    """

    tokenizer: Tokenizer
    samples_per_frame: int
    sample_rate: int
    offsets: WordOffsets = field(default_factory=WordOffsets)
    lm: NgramModel | None = None
    confidence: Confidence | None = None
    unjudged: frozenset[str] = frozenset()

    def align(
        self,
        log_probs: LogProbs,
        tokens: Sequence[int],
        beam: Sequence[Hypothesis] = (),
        *,
        samples: int,
    ) -> tuple[Word, ...]:
        """Align tokens with log-probabilities (U, V), and compute the confidence of their words.

        No word leaves the clip, of so many samples.
        """
        if self.confidence is None:
            return self._in_seconds(self._align(log_probs, tokens), samples)
        extracted = self.extract_features(log_probs, tokens, beam)
        confidences = self.confidence(extracted.features)
        words = self._in_seconds(extracted.words, samples)
        return tuple(
            word if word.text in self.unjudged else replace(word, confidence=confidence)
            for word, confidence in zip(words, confidences, strict=True)
        )

    def extract_features(
        self, log_probs: LogProbs, tokens: Sequence[int], beam: Sequence[Hypothesis] = ()
    ) -> WordFeatures:
        """Align tokens with log-probabilities (U, V), and compute the features of their words."""
        words = self._align(log_probs, tokens)
        texts = [word.text for word in words]
        features = features_of_audio(log_probs, words)
        features["agreement"] = agreement(
            texts,
            [self.tokenizer.words(each.tokens) for each in beam],
            [each.score for each in beam],
        )
        if self.lm is not None:
            features |= features_of_language(self.lm, texts)
        return WordFeatures(words, features)

    def _align(self, log_probs: LogProbs, tokens: Sequence[int]) -> tuple[TimedWord, ...]:
        """Align the tokenizer's own spelling of the text, where the frames can hold it.

        So one text has the same times whichever decoder wrote it.
        """
        spelled = self.tokenizer.encode(self.tokenizer.decode(list(tokens)))
        tokens = spelled if frames_needed(spelled) <= len(log_probs) else tokens
        blank, pieces = self.tokenizer.vocabulary.blank, self.tokenizer.texts
        return tuple(time_words(log_probs, tokens, pieces=pieces, blank=blank))

    def _in_seconds(self, words: Sequence[TimedWord], samples: int) -> tuple[Word, ...]:
        spans = self.offsets.place(words, samples=samples, step=self.samples_per_frame)
        return tuple(
            Word(word.text, *(samples_to_seconds(each, self.sample_rate) for each in span))
            for word, span in zip(words, spans, strict=True)
        )

"""The times and confidences of decoded words, the same in a run and in a bundle.

log-probabilities, tokens, beam -> alignment -> features of words -> confidences

A confidence is a logistic function of a word's features, fitted to a validation set or absent: raw
posteriors say less than the share of right words does.

Legend: U frames, V vocabulary, W words of an utterance, N words of a set, K features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from sbkit.base.arrays import Bools, Float64s, LogProbs
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.alignment import TimedWord, WordOffsets, frames_needed, time_words
from sbkit.decoding.frames import Hypothesis
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import right_words
from sbkit.lm.ngram import UNKNOWN, NgramModel
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word

CONFIDENCE_FILE = "confidence.json"  # in a run
GREEDY = "greedy"  # each decoder type has its own confidence, and so has greedy decoding
FEATURES = ("entropy", "posterior", "length", "agreement", "known", "lm")
BIAS = "bias"
MAX_WEIGHT = 1e4
TSALLIS_ORDER = 1 / 3  # of the entropy; as in NeMo, flatter than Shannon's
MIN_PROBABILITY = 1e-3  # keeps odds finite; confidences have 3 decimals

MIN_WORDS = 20  # right ones, and wrong ones; with 20, NCE on other clips was at worst 0.17
NUM_FOLDS = 10
PRIOR_PRECISION = 1.0  # of the normal distribution of a standardized feature's weight
MIN_FEATURE_SCALE = 1e-2  # standard deviation below which a feature is not used
MAX_NEWTON_STEPS = 50  # ten suffice
MAX_STEP_SIZE = 5.0  # a longer step of Newton's method might leave the region where it converges


@dataclass(frozen=True)
class Confidence:
    """A logistic function: bias + sum of weight * feature are the log odds that a word is right.

    weights: by the name of a feature, for some of FEATURES.
    """

    bias: float
    weights: Mapping[str, float]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Read plain data, {bias: ..., FEATURE: ...}.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        weights = dict(values)
        is_bounded = all(abs(weight) <= MAX_WEIGHT for weight in weights.values())
        if not is_bounded or not weights.keys() <= {BIAS, *FEATURES}:
            raise ValueError(f"a weight is unknown or beyond {MAX_WEIGHT:g}")
        return cls(weights.pop(BIAS), weights)

    def plain(self) -> dict[str, float]:
        return {BIAS: self.bias, **self.weights}

    def __call__(self, features: Mapping[str, Float64s]) -> list[float]:
        """Return the probability that each word is right, 0.001 to 0.999: features (W,) -> W."""
        odds = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        probabilities = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
        clipped = probabilities.clip(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        rounded: list[float] = np.broadcast_to(clipped, len(features["entropy"])).round(3).tolist()
        return rounded


@dataclass(frozen=True)
class WordFeatures:
    """The words of an utterance, and their features by name, (W,) each."""

    words: tuple[TimedWord, ...]
    features: dict[str, Float64s]


def features_of_audio(log_probs: LogProbs, words: Sequence[TimedWord]) -> dict[str, Float64s]:
    """Compute the features of words from log-probabilities: (U, V), W words -> (W,) each.

    entropy: mean entropy of the tokens over the word's frames (Tsallis, of order 1/3; 0 if a token
    is certain and 1 if all are equally probable; Laptev and Ginsburg, 2022, arXiv 2212.08703).
    posterior: log odds of the word's least probable token, each token at its best frame.
    length: logarithm of the number of letters.
    """
    log_probs = log_probs.astype(np.float64)
    vocab_size = log_probs.shape[1]
    max_entropy = vocab_size ** (1 - TSALLIS_ORDER) - 1
    entropies = (np.exp(TSALLIS_ORDER * log_probs).sum(1) - 1) / max_entropy
    weakest = (
        min(log_probs[token.first : token.end, token.token].max() for token in word.tokens)
        for word in words
    )
    return {
        "entropy": np.array([entropies[word.first : word.end].mean() for word in words]),
        "posterior": _log_odds(np.exp(np.array([*weakest]))),
        "length": np.log([float(len(word.text)) for word in words]),
    }


def agreement(
    words: Sequence[str], others: Sequence[Sequence[str]], scores: Sequence[float]
) -> Float64s:
    """Return how much of a beam, by its scores, agrees with each word: -> (W,) between 0 and 1.

    words: of the best hypothesis; others: the words of every hypothesis, which are aligned with
    them; scores: natural logarithms. A beam of one agrees with itself.
    """
    if len(others) < 2:
        return np.ones(len(words))
    shares = np.exp(np.array(scores) - max(scores))
    merged: dict[tuple[str, ...], float] = {}  # hypotheses may differ only in spaces
    for other, share in zip(others, (shares / shares.sum()).tolist(), strict=True):
        merged[tuple(other)] = merged.get(tuple(other), 0.0) + share
    agreed = np.zeros(len(words))
    for other, share in merged.items():
        agreed += share * np.array(right_words(other, words), np.float64)
    return agreed


def features_of_language(lm: NgramModel, words: Sequence[str]) -> dict[str, Float64s]:
    """Compute whether a language model knows each word, and ln P(word | history): -> (W,)."""
    ids, state = [lm.id_of(word) for word in words], lm.start
    log_probs: list[float] = []
    for word_id in ids:
        log_prob, state = lm.score(state, word_id)
        log_probs.append(log_prob)
    is_known = np.array([float(word_id != UNKNOWN) for word_id in ids])
    return {"known": is_known, "lm": np.array(log_probs, np.float64)}


def _log_odds(probabilities: Float64s) -> Float64s:
    odds: Float64s = np.log(
        (probabilities + MIN_PROBABILITY) / (1 - probabilities + MIN_PROBABILITY)
    )
    return odds


# ---- fitting


class LabeledWords(NamedTuple):
    """The decoded words of an utterance: its reference, their features, and which are right."""

    text: str
    features: dict[str, Float64s]
    right: list[bool]


@dataclass(frozen=True)
class FittedConfidence:
    """A confidence, and its calibration on words that it was not fitted to.

    confidence: None if there are too few words, or if it says no more than the share of right words
    does; calibration: by cross-validation over utterances, None if there are too few words.
    """

    confidence: Confidence | None
    calibration: Calibration | None
    words: int
    right: int

    def plain(self) -> dict[str, Any]:
        weights = None if self.confidence is None else self.confidence.plain()
        figures = {} if self.calibration is None else asdict(self.calibration)
        return {"weights": weights, "words": self.words, "right": self.right, **figures}

    def __str__(self) -> str:
        if self.confidence is not None:
            return f"{self.calibration}, by cross-validation"
        if self.calibration is None:
            return (
                f"none, because {self.right} of {self.words} words are right: fitting needs two "
                f"utterances with at least {MIN_WORDS} right and {MIN_WORDS} wrong words"
            )
        return f"none, because it predicts words it was not fitted to too badly: {self.calibration}"


def label_words(words: WordFeatures, reference: str) -> LabeledWords:
    """Compare the decoded words of an utterance with its reference."""
    decoded = [word.text for word in words.words]
    return LabeledWords(reference, words.features, right_words(reference.split(), decoded))


def fit_confidence(labeled: Sequence[LabeledWords]) -> FittedConfidence:
    """Fit a confidence to words, independently of the order of the utterances.

    Nothing is chosen here: features and prior are fixed, and cross-validation only measures.
    """
    labeled = sorted((utterance for utterance in labeled if utterance.right), key=_order)
    right = np.array([is_right for words in labeled for is_right in words.right], np.bool_)
    num_words, num_right = len(right), int(right.sum())
    if len(labeled) < 2 or min(num_right, num_words - num_right) < MIN_WORDS:
        return FittedConfidence(None, None, num_words, num_right)
    folds = np.array([n % NUM_FOLDS for n, words in enumerate(labeled) for _ in words.right])
    features = {
        name: np.concatenate([words.features[name] for words in labeled])
        for name in FEATURES
        if name in labeled[0].features
    }
    predicted = np.zeros(num_words)
    for fold in range(NUM_FOLDS):
        is_held_out = folds == fold
        confidence = _fit(_select(features, ~is_held_out), right[~is_held_out])
        predicted[is_held_out] = confidence(_select(features, is_held_out))
    calibration = measure_calibration(predicted.tolist(), right.tolist())
    nce = None if calibration is None else calibration.NCE
    is_useful = nce is not None and nce > 0
    fitted = _fit(features, right) if is_useful else None
    return FittedConfidence(fitted, calibration, num_words, num_right)


def _order(labeled: LabeledWords) -> tuple[Any, ...]:
    return labeled.text, *(values.tolist() for values in labeled.features.values())


def _select(features: dict[str, Float64s], mask: Bools) -> dict[str, Float64s]:
    return {name: values[mask] for name, values in features.items()}


def _fit(features: dict[str, Float64s], right: Bools) -> Confidence:
    """Fit weights to standardized features, and convert them to the features' own scales.

    Features that are nearly constant are left out.
    """
    used = {name: values for name, values in features.items() if values.std() > MIN_FEATURE_SCALE}
    stacked = np.stack([*used.values()], 1) if used else np.zeros((len(right), 0))
    mean, scale = stacked.mean(0), stacked.std(0)
    bias, weights = fit_logistic((stacked - mean) / scale, right)
    weights = weights / scale
    return Confidence(
        round(float(bias - weights @ mean), 4),
        {name: round(weight, 4) for name, weight in zip(used, weights.tolist(), strict=True)},
    )


def fit_logistic(
    features: Float64s, right: Bools, prior: float = PRIOR_PRECISION
) -> tuple[float, Float64s]:
    """Fit bias and weights of a logistic regression by Newton's method: (N, K), (N,) -> (K,).

    Iteratively reweighted least squares with a ridge: ``prior`` is the precision of the normal
    distribution of each weight; the bias has none (Bishop, 2006, "Pattern recognition and machine
    learning", 4.3.3 and 4.5.1).
    """
    inputs = np.concatenate([np.ones((len(features), 1)), features], 1)
    penalty = np.diag([1e-9, *[prior] * features.shape[1]])
    weights = np.zeros(inputs.shape[1])
    for _ in range(MAX_NEWTON_STEPS):
        probabilities = 1 / (1 + np.exp(-np.clip(inputs @ weights, -50, 50)))
        gradient = inputs.T @ (right - probabilities) - penalty @ weights
        curvature = (inputs.T * (probabilities * (1 - probabilities))) @ inputs + penalty
        step = np.linalg.solve(curvature, gradient)
        weights += step / max(1.0, np.abs(step).max() / MAX_STEP_SIZE)
    return float(weights[0]), weights[1:]


# ---- words with times and confidences


@dataclass(frozen=True, kw_only=True)
class WordAligner:
    """Compute the times and confidences of the words of a text, from the frames of a whole clip.

    Attributes:
        samples_per_frame, sample_rate: convert frames to seconds.
        offsets: how far words extend beyond the frames of their tokens.
        lm: a language model of words, or None.
        confidence: None for words without confidences.
        unjudged: words that get no confidence, because no words like them were in the data that the
            confidence was fitted to: hotwords.
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

        All words lie within the ``samples`` of the clip.
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
            [self.tokenizer.words(hypothesis.tokens) for hypothesis in beam],
            [hypothesis.score for hypothesis in beam],
        )
        if self.lm is not None:
            features |= features_of_language(self.lm, texts)
        return WordFeatures(words, features)

    def _align(self, log_probs: LogProbs, tokens: Sequence[int]) -> tuple[TimedWord, ...]:
        """Align the tokenizer's own spelling of the text, if the frames can hold it.

        Thus a text has the same times whichever decoder wrote it.
        """
        spelled = np.array(self.tokenizer.encode(self.tokenizer.decode(list(tokens))), np.int64)
        if frames_needed(spelled, np.array([len(spelled)]))[0] <= len(log_probs):
            tokens = spelled.tolist()
        blank, pieces = self.tokenizer.vocabulary.blank, self.tokenizer.texts
        return tuple(time_words(log_probs, tokens, pieces=pieces, blank=blank))

    def _in_seconds(self, words: Sequence[TimedWord], samples: int) -> tuple[Word, ...]:
        spans = self.offsets.place(words, samples=samples, step=self.samples_per_frame)
        return tuple(
            Word(word.text, *(samples_to_seconds(sample, self.sample_rate) for sample in span))
            for word, span in zip(words, spans, strict=True)
        )

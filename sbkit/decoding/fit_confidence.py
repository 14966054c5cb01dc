"""Fit confidences to the words that are decoded from validation utterances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Float64s
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import Decoder
from sbkit.decoding.greedy import GreedyDecoder
from sbkit.decoding.sample import ValidationUtterance
from sbkit.decoding.words import BEAM, FEATURES, GREEDY, Confidence, WordAligner, WordFeatures
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import ErrorCounts, count_errors, word_correctness
from sbkit.logs.progress import ping, progress_bar

MIN_RIGHT_AND_WRONG = 20  # words; with them, NCE on other clips was at worst 0.17
NUM_FOLDS = 10
PRIOR_PRECISION = 1.0  # of the normal distribution of a standardized feature's weight
MIN_FEATURE_SCALE = 1e-2  # standard deviation below which a feature is not used
MAX_NEWTON_STEPS = 50  # ten suffice
MAX_STEP_SIZE = 5.0  # a longer step of Newton's method might leave the region where it converges


@dataclass(frozen=True)
class FittedConfidence:
    """A confidence, and its calibration by cross-validation, on words that it was not fitted to.

    Both are None if there are too few words. The confidence is also None if it predicts no better
    than the share of right words.

    count, right: the number of words, and of right words.
    cer: of the decoder that it belongs to.
    """

    confidence: Confidence | None
    calibration: Calibration | None
    count: int
    right: int
    cer: float = 0.0

    def plain(self) -> dict[str, Any]:
        weights = None if self.confidence is None else self.confidence.plain()
        record: dict[str, Any] = {"weights": weights, "words": self.count, "right": self.right}
        if self.calibration is not None:
            record |= {name: getattr(self.calibration, name) for name in ("AUC", "NCE", "ECE")}
        return record

    def __str__(self) -> str:
        if self.calibration is None:
            return (
                f"none, because {self.right} of {self.count} words are right: fitting needs two "
                f"utterances with at least {MIN_RIGHT_AND_WRONG} right and {MIN_RIGHT_AND_WRONG} "
                "wrong words"
            )
        if self.confidence is not None:
            return f"{self.calibration}, by cross-validation"
        return (
            f"none, because it predicts unseen words no better than a constant: {self.calibration}"
        )


def fit_confidences(
    aligner: WordAligner, decoder: BeamDecoder | None, utterances: Sequence[ValidationUtterance]
) -> dict[str, FittedConfidence]:
    """Fit the confidences for greedy decoding and for a decoder; all ranks return the same."""
    vocabulary = aligner.tokenizer.vocabulary
    decoders: dict[str, Decoder] = {
        GREEDY: GreedyDecoder(vocab_size=vocabulary.size, blank=vocabulary.blank)
    }
    if decoder is not None:
        decoders[BEAM] = decoder
    labeled: dict[str, list[LabeledWords]] = {name: [] for name in decoders}
    with progress_bar("fitting the confidence of words", len(utterances)) as advance:
        for utterance in utterances:
            ping("confidence")
            advance(1)
            for name, one_decoder in decoders.items():
                beam = one_decoder.nbest(utterance.log_probs, utterance.attention)
                words = aligner.extract_features(utterance.log_probs, beam[0].tokens, beam)
                labeled[name].append(label_words(words, utterance.text))
    fitted: dict[str, FittedConfidence] = {}
    for name, own in labeled.items():
        gathered = list(chain.from_iterable(gather_over_ranks(own)))
        characters = sum((one.characters for one in gathered), ErrorCounts())
        fitted[name] = replace(fit_confidence(gathered), cer=characters.rate)
    return fitted


class LabeledWords(NamedTuple):
    """The features of an utterance's decoded words, and which are right.

    text: the reference; characters: the edits between the text and the reference.
    """

    text: str
    features: dict[str, Float64s]
    right: list[bool]
    characters: ErrorCounts = ErrorCounts()


def label_words(words: WordFeatures, reference: str) -> LabeledWords:
    """Compare the decoded words of an utterance with its reference."""
    decoded = [word.text for word in words.words]
    right = word_correctness(reference.split(), decoded)
    characters = count_errors(reference, " ".join(decoded)).characters
    return LabeledWords(reference, words.features, right, characters)


def fit_confidence(labeled: Sequence[LabeledWords]) -> FittedConfidence:
    """Fit a confidence to the words of utterances, independently of their order.

    Features and prior are fixed, so cross-validation only measures the fit.
    """

    def sort_key(words: LabeledWords) -> tuple[str, list[list[float]]]:
        return words.text, [values.tolist() for values in words.features.values()]

    labeled = sorted((words for words in labeled if words.right), key=sort_key)
    right = np.array([is_right for words in labeled for is_right in words.right], np.bool_)
    num_right = int(right.sum())
    if len(labeled) < 2 or min(num_right, len(right) - num_right) < MIN_RIGHT_AND_WRONG:
        return FittedConfidence(None, None, len(right), num_right)
    names = [name for name in FEATURES if name in labeled[0].features]
    features = {name: np.concatenate([words.features[name] for words in labeled]) for name in names}
    utterances = np.repeat(np.arange(len(labeled)), [len(words.right) for words in labeled])
    predicted = np.zeros(len(right))
    for fold in range(NUM_FOLDS):
        is_held_out = utterances % NUM_FOLDS == fold
        confidence = _fit(_select(features, ~is_held_out), right[~is_held_out])
        predicted[is_held_out] = confidence(_select(features, is_held_out))
    calibration = measure_calibration(predicted.tolist(), right.tolist())
    is_useful = calibration is not None and (calibration.NCE or 0.0) > 0
    fitted = _fit(features, right) if is_useful else None
    return FittedConfidence(fitted, calibration, len(right), num_right)


def _select(features: dict[str, Float64s], mask: Bools) -> dict[str, Float64s]:
    return {name: values[mask] for name, values in features.items()}


def _fit(features: dict[str, Float64s], right: Bools) -> Confidence:
    """Fit weights to standardized features, except nearly constant ones, and undo the scaling."""
    used = {name: values for name, values in features.items() if values.std() > MIN_FEATURE_SCALE}
    stacked = np.stack([*used.values()], 1) if used else np.zeros((len(right), 0))
    mean = stacked.mean(0)
    scale = stacked.std(0)
    bias, weights = fit_logistic((stacked - mean) / scale, right)
    weights /= scale
    return Confidence(
        round(float(bias - weights @ mean), 4),
        {name: round(weight, 4) for name, weight in zip(used, weights.tolist(), strict=True)},
    )


def fit_logistic(features: Float64s, right: Bools) -> tuple[float, Float64s]:
    """Fit bias and weights of a logistic regression by Newton's method: (N, K), (N,) -> (K,).

    Iteratively reweighted least squares with a ridge, which the bias lacks (Bishop, 2006, "Pattern
    recognition and machine learning", 4.3.3 and 4.5.1).
    """
    inputs = np.concatenate([np.ones((len(features), 1)), features], 1)
    penalty = np.diag([1e-9, *[PRIOR_PRECISION] * features.shape[1]])
    weights = np.zeros(inputs.shape[1])
    for _ in range(MAX_NEWTON_STEPS):
        probabilities = 1 / (1 + np.exp(-np.clip(inputs @ weights, -50, 50)))
        gradient = inputs.T @ (right - probabilities) - penalty @ weights
        curvature = (inputs.T * (probabilities * (1 - probabilities))) @ inputs + penalty
        step = np.linalg.solve(curvature, gradient)
        weights += step / max(1.0, np.abs(step).max() / MAX_STEP_SIZE)
    return float(weights[0]), weights[1:]

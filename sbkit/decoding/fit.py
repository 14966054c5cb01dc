"""Fit a decoder to validation data: the weights of its models, and confidences.

Legend: U frames, V vocabulary.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.messages import plural
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.beam import MAX_CANDIDATES, TOKEN_THRESHOLD, BeamDecoder
from sbkit.decoding.decoder import WORD_WEIGHTS, Decoder, DecoderWeights
from sbkit.decoding.greedy import GreedyDecoder, near_speech
from sbkit.decoding.word_times import BEAM, GREEDY, Confidence, WordAligner
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import ErrorCounts, TextErrors, count_errors, word_correctness
from sbkit.logs.progress import ping, progress_bar
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Over all ranks; all trials of a token take 3 ms. Even if each frame of 40 ms has `MAX_CANDIDATES`,
# because the model is uncertain, this is enough for three minutes of speech.
MAX_SAMPLE_TOKENS = 60_000

HALTON_BASES = (2, 3, 5, 7, 11, 13)
NUM_TRIALS = 64  # settings of the weights
TRIAL_BEAM_SIZE = 16  # takes half the time of 32, and has nearly the same best weights
NUM_AVERAGED = 12
RIDGE = 1.0
WEIGHT_RANGES = {
    "word": (0.2, 1.0),
    "word_bonus": (0.0, 2.5),
    "unknown_word": (-10.0, -2.0),
    "token": (0.0, 0.6),
    "token_bonus": (0.0, 1.0),
    "attention": (0.0, 2.5),
}
# Of a decoder with own tokens, which are words and not characters: a text has fewer of them.
OWN_TOKENS_RANGE = (0.0, 8.0)

MIN_RIGHT_AND_WRONG = 20  # words; with them, NCE on other clips was at worst 0.17
NUM_FOLDS = 10
PRIOR_PRECISION = 1.0  # of the normal distribution of a standardized feature's weight
MIN_FEATURE_SCALE = 1e-2  # standard deviation below which a feature is not used
MAX_NEWTON_STEPS = 50  # ten suffice
MAX_STEP_SIZE = 5.0  # a longer step of Newton's method might leave the region where it converges


# ---- a sample of the validation sets

Order = tuple[str, str]  # the sort key of an utterance for filling a sample


class ValidationUtterance(NamedTuple):
    """An utterance of a validation set: (U, V), the reference, and what a decoder needs to rescore.

    id: decides whether the utterance is in a sample.
    """

    log_probs: LogProbs
    text: str
    attention: AttentionScorer | None = None
    id: str = ""

    @property
    def order(self) -> Order:
        return order_of(self.id), self.text


def order_of(id: str) -> str:
    """Return the sort key of an utterance: its id hashed, so that a sample is a random one."""
    return hashlib.sha256(id.encode()).hexdigest()


def sample_utterances(
    utterances: Iterable[ValidationUtterance],
    silent: Collection[int],
    max_tokens: int = MAX_SAMPLE_TOKENS,
) -> list[ValidationUtterance]:
    """Keep this rank's part of a sample with at most ``max_tokens`` over all ranks.

    The sample is the same for any number of ranks. Other utterances are dropped as they arrive,
    because the log-probabilities of a large set do not fit into memory.

    silent: the tokens without sound. Frames without speech are no work, so they do not count.
    """
    sample: list[ValidationUtterance] = []
    counts: dict[Order, int] = {}
    for utterance in utterances:
        sample.append(utterance)
        likely = (utterance.log_probs > TOKEN_THRESHOLD).sum(1)
        is_speech = near_speech(utterance.log_probs, silent)
        counts[utterance.order] = int(likely.clip(max=MAX_CANDIDATES)[is_speech].sum())
        if sum(counts.values()) > 2 * max_tokens:
            last = _last_within(counts.items(), max_tokens)
            counts = {order: count for order, count in counts.items() if order <= last}
            sample = [utterance for utterance in sample if utterance.order <= last]
    all_counts = [pair for share in gather_over_ranks([*counts.items()]) for pair in share]
    last = _last_within(all_counts, max_tokens)
    return [utterance for utterance in sample if utterance.order <= last]


def _last_within(counts: Iterable[tuple[Order, int]], max_tokens: int) -> Order:
    """Return the key of the last utterance in order before the sum exceeds ``max_tokens``."""
    total = 0
    last = ("", "")
    for order, count in sorted(counts):
        total += count
        if total > max_tokens and last != ("", ""):
            break
        last = order
    return last


# ---- results


@dataclass(frozen=True)
class FittedWeights:
    """The chosen weights, and the errors with them; no WER unless ``by_words``."""

    weights: DecoderWeights
    errors: TextErrors
    by_words: bool = True

    def plain(self) -> dict[str, Any]:
        return {
            "weights": asdict(self.weights),
            **self.errors.rates(by_words=self.by_words),
            "utterances": self.errors.utterances,
        }


@dataclass(frozen=True)
class FittedConfidence:
    """A confidence, and its calibration by cross-validation, on words that it was not fitted to.

    Both are None if there are too few words. The confidence is also None if it predicts no better
    than the share of right words. ``cer`` is that of the decoder.
    """

    confidence: Confidence | None
    calibration: Calibration | None
    count: int
    right: int
    cer: float

    def plain(self) -> dict[str, Any]:
        weights = None if self.confidence is None else self.confidence.plain()
        record: dict[str, Any] = {"weights": weights, "words": self.count, "right": self.right}
        if self.calibration is not None:
            record |= {name: getattr(self.calibration, name) for name in ("AUC", "NCE", "ECE")}
        return record

    def __str__(self) -> str:
        if self.calibration is None:
            return (
                f"none: {self.right} of {self.count} words are right, but fitting needs two "
                f"utterances, and {MIN_RIGHT_AND_WRONG} words each that are right and wrong"
            )
        if self.confidence is not None:
            return f"{self.calibration}, by cross-validation"
        return f"none: it predicts unseen words no better than a constant: {self.calibration}"


@dataclass(frozen=True)
class FittedDecoder:
    """A decoder that was fitted to validation sets, None for greedy decoding."""

    decoder: BeamDecoder | None
    weights: FittedWeights | None
    confidences: Mapping[str, FittedConfidence]
    splits: Sequence[str]

    @property
    def note(self) -> str:
        """A sentence if the CER of the decoder is above that of greedy decoding, "" otherwise."""
        if self.decoder is None:
            return ""
        cer, greedy_cer = (self.confidences[name].cer for name in (BEAM, GREEDY))
        if not cer > greedy_cer:
            return ""
        return (
            f"the CER of the beam decoder, {100 * cer:.1f} %, is above that of greedy decoding, "
            f"{100 * greedy_cer:.1f} % ({', '.join(self.splits)})"
        )

    @property
    def decoder_record(self) -> dict[str, Any] | None:
        """What a bundle stores of the decoder, as plain data; None for greedy decoding."""
        if self.decoder is None:
            return None
        record = self.decoder.plain()
        if self.weights is not None:
            record |= {"chosen_on": [*self.splits], **self.weights.plain()}
        return record | ({"note": self.note} if self.note else {})

    @property
    def confidence_record(self) -> dict[str, Any]:
        return {name: fitted.plain() for name, fitted in self.confidences.items()}


def fit_decoder(
    decoder: BeamDecoder | None,
    aligner: WordAligner,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str],
    by_words: bool,
) -> FittedDecoder:
    """Fit the weights of a decoder, unless it has some, and the confidences of words.

    utterances: this rank's share of `sample_utterances`.
    by_words: False for a language without spaces between words.
    """
    word_lm = None if decoder is None else decoder.language_models.words
    aligner = replace(aligner, word_lm=word_lm)
    weights = None
    if decoder is not None and decoder.needs_tuning and decoder.used_weights:
        weights = fit_weights(decoder, utterances, splits=splits, by_words=by_words)
        decoder = decoder.with_weights(weights.weights)
    confidences = fit_confidences(aligner, decoder, utterances)
    sets = ", ".join(splits) or "no validation set"
    for name, confidence in confidences.items():
        logger.info(f"confidence of words, {name}: {confidence} ({sets})")
    fitted = FittedDecoder(decoder, weights, confidences, splits)
    if fitted.note:
        logger.info(fitted.note)
    return fitted


# ---- weights


def fit_weights(
    decoder: BeamDecoder,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str] = (),
    by_words: bool = True,
) -> FittedWeights:
    """Choose weights with a low sum of CER and, in a language with words, WER.

    ``NUM_TRIALS`` settings, which fill the space of all weights evenly, are tried, and a quadratic
    function is fitted to their errors. The result is the mean of the ``NUM_AVERAGED`` settings
    where this function is lowest, because the fewest errors on a few hundred words are a matter of
    luck.
    """
    sets = ", ".join(splits)
    count = plural(sum(gather_over_ranks(len(utterances))), "utterance")
    logger.info(f"decoder: trying {NUM_TRIALS} settings of its weights on {count} ({sets})")
    names = decoder.used_weights
    # If a language does not separate words, a model of words knows only whole sentences.
    if not by_words and "token" in names:
        names = [name for name in names if name not in WORD_WEIGHTS]
    points = np.stack([_halton(base) for base in HALTON_BASES[: len(names)]], 1)
    ranges = dict(WEIGHT_RANGES)
    own = any(
        utterance.attention and utterance.attention.has_own_tokens for utterance in utterances
    )
    if any(gather_over_ranks(own)):
        ranges["attention"] = OWN_TOKENS_RANGE
    quick_decoder = decoder.copy_with(beam_size=min(decoder.beam_size, TRIAL_BEAM_SIZE))
    trials = (quick_decoder.with_weights(_weights_at(names, point, ranges)) for point in points)
    num_decoded = (NUM_TRIALS + 1) * len(utterances)
    with progress_bar("trying weights of the decoder", num_decoded) as advance:

        def on_utterance() -> None:
            ping("tuning")
            advance(1)

        errors = count_all_errors(trials, utterances, decoder.tokenizer, on_utterance)
        if not errors[0].words.reference_length:
            raise DataError(
                "The weights of a decoder cannot be fitted to a validation set without transcripts."
                " Write them into the YAML."
            )
        values = np.array([trial.cer + (trial.wer if by_words else 0) for trial in errors])
        smooth = _fit_quadratic(points, values)
        center = points[smooth.argsort(kind="stable")[:NUM_AVERAGED]].mean(0)
        best = decoder.with_weights(_weights_at(names, center, ranges))
        (best_errors,) = count_all_errors([best], utterances, decoder.tokenizer, on_utterance)
    chosen = asdict(best.weights)
    text = ", ".join(f"{name} {chosen[name]:g}" for name in best.used_weights)
    if decoder.language_models.words is not None and not best.weights.word:
        text += ", without the model of words, because the language does not separate them"
    logger.info(f"decoder: {text} (chosen on {sets})")
    return FittedWeights(best.weights, best_errors, by_words)


def count_all_errors(
    decoders: Iterable[Decoder],
    utterances: Sequence[ValidationUtterance],
    tokenizer: Tokenizer,
    on_utterance: Callable[[], object] = lambda: None,
) -> list[TextErrors]:
    """Decode with each decoder, and add the errors of all ranks."""
    own: list[TextErrors] = []
    for decoder in decoders:
        errors = TextErrors()
        for utterance in utterances:
            on_utterance()
            tokens = list(decoder.nbest(utterance.log_probs, utterance.attention)[0].tokens)
            errors += count_errors(utterance.text, tokenizer.decode(tokens))
        own.append(errors)
    return [sum(shares, TextErrors()) for shares in zip(*gather_over_ranks(own), strict=True)]


def _weights_at(
    names: Sequence[str], point: Float64s, ranges: Mapping[str, tuple[float, float]]
) -> DecoderWeights:
    """Return the weights at a point of the unit cube."""
    values = {"word": 0.0}
    for name, share in zip(names, point.tolist(), strict=True):
        low, high = ranges[name]
        values[name] = round(low + share * (high - low), 3)
    return DecoderWeights(**values)


def _halton(base: int) -> Float64s:
    """Return the first numbers of Halton's sequence, which fill the unit interval evenly."""
    units = float(base) ** np.arange(7)  # more digits than NUM_TRIALS has in base 2
    indices = np.arange(1, NUM_TRIALS + 1)[:, None]
    numbers: Float64s = (indices // units % base / units / base).sum(1)
    return numbers


def _fit_quadratic(points: Float64s, values: Float64s) -> Float64s:
    """Fit a quadratic function by ridge regression, and return it at the points: (N, D), (N,)."""
    centered = 2 * points - 1
    first, second = np.triu_indices(points.shape[1])
    features = np.concatenate([centered, centered[:, first] * centered[:, second]], 1)
    features -= features.mean(0)
    curvature = features.T @ features + RIDGE * np.eye(features.shape[1])
    weights = np.linalg.solve(curvature, features.T @ (values - values.mean()))
    fitted: Float64s = features @ weights + values.mean()
    return fitted


# ---- confidences of words


def fit_confidences(
    aligner: WordAligner, decoder: BeamDecoder | None, utterances: Sequence[ValidationUtterance]
) -> dict[str, FittedConfidence]:
    """Fit the confidences for greedy decoding and for a decoder; all ranks return the same."""
    decoders: dict[str, Decoder] = {GREEDY: GreedyDecoder(aligner.tokenizer.vocabulary)}
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
                decoded = [word.text for word in words.words]
                right = word_correctness(utterance.text.split(), decoded)
                edits = count_errors(utterance.text, " ".join(decoded)).characters
                labeled[name].append(LabeledWords(utterance.text, words.features, right, edits))
    return {
        name: fit_confidence([*chain.from_iterable(gather_over_ranks(own))])
        for name, own in labeled.items()
    }


class LabeledWords(NamedTuple):
    """An utterance's reference, the features of its decoded words, and which words are right."""

    text: str
    features: dict[str, Float64s]
    right: list[bool]
    characters: ErrorCounts


def fit_confidence(labeled: Sequence[LabeledWords]) -> FittedConfidence:
    """Fit a confidence to the words of utterances, independently of their order."""

    def sort_key(words: LabeledWords) -> tuple[str, list[list[float]]]:
        return words.text, [values.tolist() for values in words.features.values()]

    cer = sum((words.characters for words in labeled), ErrorCounts()).rate
    labeled = sorted((words for words in labeled if words.right), key=sort_key)
    right = np.array([is_right for words in labeled for is_right in words.right], np.bool_)
    num_right = int(right.sum())
    if len(labeled) < 2 or min(num_right, len(right) - num_right) < MIN_RIGHT_AND_WRONG:
        return FittedConfidence(None, None, len(right), num_right, cer)
    names = labeled[0].features
    features = {name: np.concatenate([words.features[name] for words in labeled]) for name in names}
    utterances = np.repeat(np.arange(len(labeled)), [len(words.right) for words in labeled])
    predicted = np.zeros(len(right))
    for fold in range(NUM_FOLDS):
        is_held_out = utterances % NUM_FOLDS == fold
        confidence = _fit_features(_select(features, ~is_held_out), right[~is_held_out])
        predicted[is_held_out] = confidence(_select(features, is_held_out))
    calibration = measure_calibration(predicted.tolist(), right.tolist())
    is_useful = calibration is not None and (calibration.NCE or 0.0) > 0
    fitted = _fit_features(features, right) if is_useful else None
    return FittedConfidence(fitted, calibration, len(right), num_right, cer)


def _select(features: dict[str, Float64s], mask: Bools) -> dict[str, Float64s]:
    return {name: values[mask] for name, values in features.items()}


def _fit_features(features: dict[str, Float64s], right: Bools) -> Confidence:
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

    The weights have a ridge, the bias has none (Bishop 2006, 4.3.3 and 4.5.1).
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

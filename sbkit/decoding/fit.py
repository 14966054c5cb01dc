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

from sbkit.base.arrays import Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.messages import plural
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.beam import MAX_CANDIDATES, TOKEN_THRESHOLD, BeamDecoder
from sbkit.decoding.decoder import WORD_WEIGHTS, Decoder, DecoderWeights
from sbkit.decoding.greedy import GreedyDecoder, near_speech
from sbkit.decoding.word_times import (
    BEAM,
    GREEDY,
    Confidence,
    WordAligner,
    WordFeatures,
    word_features,
)
from sbkit.distributed.ranks import gather_over_ranks
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
# For a decoder with its own tokens, which are words, not characters: a text has fewer of them.
OWN_TOKENS_RANGE = (0.0, 8.0)

MIN_RIGHT_AND_WRONG = 20  # words; from 40, the AUC on other clips was at worst 0.85
PRIOR_PRECISION = 0.01  # of the normal distribution of a weight, so that none becomes infinite
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
    silent_ids: Collection[int],
    max_tokens: int = MAX_SAMPLE_TOKENS,
) -> list[ValidationUtterance]:
    """Keep this rank's share of a sample with at most ``max_tokens`` over all ranks.

    The sample is the same for any number of ranks. Other utterances are dropped as they arrive,
    because the log-probabilities of a large set do not fit into memory.

    silent_ids: the tokens without sound. Frames without speech take no time, so they do not count.
    """
    sample: list[ValidationUtterance] = []
    counts: dict[Order, int] = {}
    for utterance in utterances:
        sample.append(utterance)
        likely = (utterance.log_probs > TOKEN_THRESHOLD).sum(1)
        is_speech = near_speech(utterance.log_probs, silent_ids)
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
    """The chosen weights, and the errors with them; a WER only if ``by_words``."""

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
    """A confidence, None if there are too few words; and the CER of the decoder."""

    confidence: Confidence | None
    num_words: int
    num_right: int
    cer: float

    def __str__(self) -> str:
        words = f"{self.num_words} words, {self.num_right} of them right"
        if self.confidence is not None:
            return f"fitted to {words}"
        minimum = MIN_RIGHT_AND_WRONG
        return f"none: {words}, but fitting needs {minimum} right and {minimum} wrong ones"


@dataclass(frozen=True)
class FittedDecoder:
    """A decoder that was fitted to validation sets, None for greedy decoding."""

    decoder: BeamDecoder | None
    weights: FittedWeights | None
    confidences: Mapping[str, FittedConfidence]
    splits: Sequence[str]

    @property
    def note(self) -> str:
        """A sentence if greedy decoding has a lower CER than the decoder, else ""."""
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
        """The decoder's settings that a bundle stores, as plain data; None for greedy decoding."""
        if self.decoder is None:
            return None
        record = self.decoder.plain()
        if self.weights is not None:
            record |= {"chosen_on": [*self.splits], **self.weights.plain()}
        return record | ({"note": self.note} if self.note else {})

    @property
    def confidence_record(self) -> dict[str, Any]:
        confidences = {name: fitted.confidence for name, fitted in self.confidences.items()}
        return {name: asdict(fitted) for name, fitted in confidences.items() if fitted is not None}


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

    It tries ``NUM_TRIALS`` settings, which fill the space of all weights evenly, and fits a
    quadratic function to their errors. The result is the mean of the ``NUM_AVERAGED`` settings
    where this function is lowest, because the single best one on a few hundred words is a matter
    of luck.
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
    has_own_tokens = any(u.attention and u.attention.has_own_tokens for u in utterances)
    if any(gather_over_ranks(has_own_tokens)):
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
    errors_by_decoder: list[TextErrors] = []
    for decoder in decoders:
        errors = TextErrors()
        for utterance in utterances:
            on_utterance()
            tokens = list(decoder.nbest(utterance.log_probs, utterance.attention)[0].tokens)
            errors += count_errors(utterance.text, tokenizer.decode(tokens))
        errors_by_decoder.append(errors)
    per_rank = gather_over_ranks(errors_by_decoder)
    return [sum(errors_of_ranks, TextErrors()) for errors_of_ranks in zip(*per_rank, strict=True)]


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
    units = float(base) ** np.arange(7)  # as many digits as NUM_TRIALS has in base 2
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
    words: dict[str, list[tuple[WordFeatures, bool]]] = {name: [] for name in decoders}
    edits = dict.fromkeys(decoders, ErrorCounts())
    with progress_bar("fitting the confidence of words", len(utterances)) as advance:
        for utterance in utterances:
            ping("confidence")
            advance(1)
            for name, one_decoder in decoders.items():
                best = one_decoder.nbest(utterance.log_probs, utterance.attention)[0]
                timed_words = aligner.find_frames(utterance.log_probs, best.tokens, is_decoded=True)
                texts = [word.text for word in timed_words]
                right = word_correctness(utterance.text.split(), texts)
                words[name] += zip(word_features(timed_words, aligner.word_lm), right, strict=True)
                edits[name] += count_errors(utterance.text, " ".join(texts)).characters
    fitted: dict[str, FittedConfidence] = {}
    for name in decoders:
        all_words = [*chain.from_iterable(gather_over_ranks(words[name]))]
        num_right = sum(is_right for _, is_right in all_words)
        cer = sum(gather_over_ranks(edits[name]), ErrorCounts()).rate
        confidence = fit_confidence(all_words)
        fitted[name] = FittedConfidence(confidence, len(all_words), num_right, cer)
    return fitted


def fit_confidence(words: Sequence[tuple[WordFeatures, bool]]) -> Confidence | None:
    """Fit weights to the features of words and whether they are right, by Newton's method.

    The order of the words does not matter. Returns None if too few are right or wrong.
    """
    right = np.array([is_right for _, is_right in sorted(words)], np.float64)
    if min(right.sum(), len(right) - right.sum()) < MIN_RIGHT_AND_WRONG:
        return None
    inputs = np.array([(1.0, *features) for features, _ in sorted(words)])
    penalty = PRIOR_PRECISION * np.eye(inputs.shape[1])
    weights = np.zeros(inputs.shape[1])
    for _ in range(MAX_NEWTON_STEPS):
        probabilities = 1 / (1 + np.exp(-np.clip(inputs @ weights, -50, 50)))
        gradient = inputs.T @ (right - probabilities) - penalty @ weights
        curvature = (inputs.T * (probabilities * (1 - probabilities))) @ inputs + penalty
        newton_step = np.linalg.solve(curvature, gradient)
        weights += newton_step / max(1.0, np.abs(newton_step).max() / MAX_STEP_SIZE)
    return Confidence(*weights.round(4).tolist())

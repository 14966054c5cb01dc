"""Fit a decoder to validation data: the weights of its models, and confidences.

log-probabilities and reference texts -> a sample of them -> errors with trial weights
-> the best weights -> features of the words that are decoded with them -> confidences of words
-> features of the whole texts -> confidences of utterances
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Counts, Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.messages import plural
from sbkit.decoding.decoder import (
    DECODER_FILE,
    MAX_CANDIDATES,
    TOKEN_THRESHOLD,
    AttentionScorer,
    BeamDecoder,
    DecoderWeights,
)
from sbkit.decoding.greedy import GreedyDecoder, find_speech
from sbkit.decoding.utterances import EXTRA_ERRORS, UTTERANCES, text_share, utterance_features
from sbkit.decoding.words import (
    CONFIDENCE_FILE,
    FEATURES,
    GREEDY,
    Confidence,
    WordAligner,
    WordFeatures,
)
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.calibration import Calibration, measure_calibration
from sbkit.evaluate.wer import ErrorCounts, Scores, count_errors, word_correctness
from sbkit.lm.language_models import LanguageModels
from sbkit.logs.progress import progress_bar
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WEIGHT_RANGES: Mapping[str, tuple[float, float]] = {
    "word": (0.2, 1.0),
    "word_bonus": (0.0, 2.5),
    "unknown_word": (-10.0, -2.0),
    "token": (0.0, 0.6),
    "token_bonus": (0.0, 1.0),
    "attention": (0.0, 2.5),
}
# A graph scores a single alignment, and an unknown word costs its tokens.
GRAPH_WEIGHT_RANGES = {"word": (0.5, 1.5), "word_bonus": (-1.0, 2.0), "unknown_word": (-8.0, 1.0)}
WORD_WEIGHTS = ("word", "unknown_word", "word_bonus")
HALTON_BASES = (2, 3, 5, 7, 11, 13)
NUM_TRIALS = 64  # settings of the weights
NUM_AVERAGED = 12
TRIAL_BEAM_SIZE = 16  # takes half the time of 32
RIDGE = 1.0
MAX_TRIAL_NGRAMS = 100_000  # in a trial graph: 4 s to build each
# Over all ranks; all trials of a token take 3 ms. Even if each frame of 40 ms has `MAX_CANDIDATES`,
# because the model is uncertain, this is enough for three minutes of speech.
MAX_SAMPLE_TOKENS = 60_000

# With 20 words, NCE on other clips was at worst 0.17. Utterances have half as many features.
MIN_RIGHT_AND_WRONG = {"words": 20, "utterances": 10}
NUM_FOLDS = 10
PRIOR_PRECISION = 1.0  # of the normal distribution of a standardized feature's weight
MIN_FEATURE_SCALE = 1e-2  # standard deviation below which a feature is not used
MAX_NEWTON_STEPS = 50  # ten suffice
MAX_STEP_SIZE = 5.0  # a longer step of Newton's method might leave the region where it converges

Ping = Callable[[], object]  # tells a watchdog that work goes on
Order = tuple[str, str]  # the sort key of an utterance for filling a sample


def no_ping(*_: object) -> None:
    """Do nothing: there is no watchdog."""


class ValidationUtterance(NamedTuple):
    """An utterance of a validation set.

    log_probs: (U, V); text: the reference; attention: for a decoder that rescores; id: decides
    whether the utterance is in a sample.
    """

    log_probs: LogProbs
    text: str
    attention: AttentionScorer | None = None
    id: str = ""

    @property
    def order(self) -> Order:
        return order_of(self.id), self.text


@dataclass(frozen=True)
class FittedWeights:
    """The chosen weights, and the errors with them.

    by_words: False for a language without spaces between words, which has no WER.
    """

    weights: DecoderWeights
    scores: Scores
    by_words: bool = True

    def plain(self) -> dict[str, Any]:
        return {
            "weights": self.weights.plain(),
            "CER": self.scores.cer,
            **({"WER": self.scores.wer} if self.by_words else {}),
            "utterances": self.scores.utterances,
        }


@dataclass(frozen=True)
class FittedConfidence:
    """A confidence, and its calibration by cross-validation, on words that it was not fitted to.

    Both are None if there are too few words. The confidence is also None if it predicts no better
    than the share of right words.

    unit: what is right or wrong, words or whole utterances.
    extra_errors: of utterances, as in `UtteranceConfidence`.
    utterances: beside a confidence of words, that of the utterances.
    cer: of the decoder that it belongs to.
    """

    confidence: Confidence | None
    calibration: Calibration | None
    count: int
    right: int
    unit: str = "words"
    extra_errors: float | None = None
    utterances: "FittedConfidence | None" = None
    cer: float = 0.0

    def plain(self) -> dict[str, Any]:
        weights = None if self.confidence is None else self.confidence.plain()
        record: dict[str, Any] = {"weights": weights, self.unit: self.count, "right": self.right}
        if self.calibration is not None:
            record |= {name: getattr(self.calibration, name) for name in ("AUC", "NCE", "ECE")}
        if self.extra_errors is not None:
            record[EXTRA_ERRORS] = self.extra_errors
        if self.utterances is not None:
            record[UTTERANCES] = self.utterances.plain()
        return record

    def __str__(self) -> str:
        if self.calibration is None:
            minimum = MIN_RIGHT_AND_WRONG[self.unit]
            return (
                f"none, because {self.right} of {self.count} {self.unit} are right: fitting needs "
                f"two utterances with at least {minimum} right and {minimum} wrong {self.unit}"
            )
        figures = self.calibration.describe(self.unit)
        if self.confidence is not None:
            return f"{figures}, by cross-validation"
        return f"none, because it predicts unseen {self.unit} no better than a constant: {figures}"


@dataclass(frozen=True)
class FittedDecoder:
    """A decoder that was fitted to validation sets.

    decoder: None for greedy decoding; weights: None if they were not fitted; confidences: by
    decoder type; splits: the names of the validation sets.
    """

    decoder: BeamDecoder | None
    weights: FittedWeights | None
    confidences: Mapping[str, FittedConfidence]
    splits: Sequence[str]

    @property
    def note(self) -> str:
        """A sentence if the CER of the decoder is above that of greedy decoding, "" otherwise."""
        decoder_type = GREEDY if self.decoder is None else self.decoder.decoder_type
        cer, greedy_cer = (self.confidences[name].cer for name in (decoder_type, GREEDY))
        if cer <= greedy_cer:
            return ""
        return (
            f"the CER of the {decoder_type} decoder, {100 * cer:.1f} %, is above that of greedy "
            f"decoding, {100 * greedy_cer:.1f} % ({', '.join(self.splits)}). Train longer, or pass "
            "--decoder greedy if characters matter more than words."
        )

    def write(self, folder: Path) -> None:
        """Write `decoder.json`, if there is a decoder, and `confidence.json`; on rank 0 only."""
        if rank() > 0:
            return
        records: dict[str, dict[str, Any]] = {}
        if self.decoder is not None:
            records[DECODER_FILE] = self.decoder.plain()
            if self.weights is not None:
                records[DECODER_FILE] |= {"chosen_on": [*self.splits], **self.weights.plain()}
        records[CONFIDENCE_FILE] = {name: fit.plain() for name, fit in self.confidences.items()}
        for name, record in records.items():
            write_text_atomically(folder / name, to_json(record, indent=1) + "\n")


def fit_decoder(
    decoder: BeamDecoder | None,
    aligner: WordAligner,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str],
    by_words: bool,
    ping: Callable[[str], object] = no_ping,
    quiet: bool = False,
) -> FittedDecoder:
    """Fit the weights of a decoder, unless it has some, and the confidences of words.

    Args:
        decoder: None for greedy decoding, which has only confidences.
        aligner: extracts the features of words.
        utterances: this rank's share of `sample_utterances`.
        splits: the names of the validation sets.
        by_words: False for a language without spaces between words.
        ping: called with "tuning" or "confidence" before each utterance, for a watchdog.
        quiet: show no progress.
    """
    weights = None
    if decoder is not None and decoder.needs_tuning and any(used_weights(decoder)):
        weights = fit_weights(
            decoder,
            utterances,
            splits=splits,
            by_words=by_words,
            ping=lambda: ping("tuning"),
            quiet=quiet,
        )
        decoder = decoder.with_weights(weights.weights)
    confidences = fit_confidences(
        aligner,
        decoder,
        utterances,
        by_words=by_words,
        ping=lambda: ping("confidence"),
        quiet=quiet,
    )
    sets = ", ".join(splits) or "no validation set"
    for name, fit in confidences.items():
        logger.info(f"confidence of words, {name}: {fit} ({sets})")
        if fit.utterances is not None:
            logger.info(f"confidence of utterances, {name}: {fit.utterances} ({sets})")
    fitted = FittedDecoder(decoder, weights, confidences, splits)
    if fitted.note:
        logger.info(fitted.note)
    return fitted


# ---- a sample of the validation sets


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
        is_speech = find_speech(utterance.log_probs, silent)
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


# ---- weights


def fit_weights(
    decoder: BeamDecoder,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str],
    by_words: bool,
    ping: Ping = no_ping,
    quiet: bool = False,
) -> FittedWeights:
    """Return the best weights of a decoder, and the errors with them."""
    sets = ", ".join(splits)
    count = plural(sum(gather_over_ranks(len(utterances))), "utterance")
    logger.info(f"decoder: trying {NUM_TRIALS} settings of its weights on {count} ({sets})")
    num_decoded = (NUM_TRIALS + 1) * len(utterances)
    with progress_bar("trying weights of the decoder", num_decoded, quiet=quiet) as advance:

        def ping_and_advance() -> None:
            ping()
            advance(1)

        fitted = search_weights(decoder, utterances, by_words=by_words, ping=ping_and_advance)
    values = fitted.weights.plain()
    names = used_weights(decoder.with_weights(fitted.weights))
    text = ", ".join(f"{name} {values[name]:g}" for name in names)
    if decoder.language_models.words is not None and not fitted.weights.word:
        text += ", without the model of words, because the language does not separate them"
    logger.info(f"decoder: {text} (chosen on {sets})")
    return fitted


def search_weights(
    decoder: BeamDecoder,
    utterances: Sequence[ValidationUtterance],
    *,
    by_words: bool = True,
    ping: Ping = no_ping,
) -> FittedWeights:
    """Choose weights with a low error, as `error_of` defines it.

    ``NUM_TRIALS`` settings, which fill the space of all weights evenly, are tried, and a quadratic
    function is fitted to their errors. The result is the mean of the ``NUM_AVERAGED`` settings
    where this function is lowest, because the fewest errors on a few hundred words are a matter of
    luck.

    Raises DataError if the validation sets are empty.
    """
    names = list(used_weights(decoder))
    if _drops_word_model(decoder, by_words=by_words):
        names = [name for name in names if name not in WORD_WEIGHTS]
    points = np.stack([_halton(NUM_TRIALS, base) for base in HALTON_BASES[: len(names)]], 1)
    ranges = GRAPH_WEIGHT_RANGES if decoder.decoder_type == "graph" else WEIGHT_RANGES
    quick_decoder = _make_quick(decoder)
    trials = (quick_decoder.with_weights(_weights_at(names, ranges, point)) for point in points)
    scores = count_all_errors(trials, utterances, ping)
    if not scores[0].utterances:
        raise DataError(
            "The weights of a decoder are fitted to a validation set, but it is empty. Write the "
            "weights into the YAML, or name a set."
        )
    smooth = _fit_quadratic(points, np.array([error_of(s, by_words=by_words) for s in scores]))
    center = points[smooth.argsort(kind="stable")[:NUM_AVERAGED]].mean(0)
    best = _weights_at(names, ranges, center)
    (best_scores,) = count_all_errors([decoder.with_weights(best)], utterances, ping)
    return FittedWeights(best, best_scores, by_words)


def count_all_errors(
    decoders: Iterable[BeamDecoder], utterances: Sequence[ValidationUtterance], ping: Ping = no_ping
) -> list[Scores]:
    """Decode with each decoder, and add the errors of all ranks; ping before each utterance."""
    own_scores = [
        count_own_errors(decoder, utterances, decoder.tokenizer, ping) for decoder in decoders
    ]
    return [sum(shares, Scores()) for shares in zip(*gather_over_ranks(own_scores), strict=True)]


def count_own_errors(
    decoder: BeamDecoder | GreedyDecoder,
    utterances: Sequence[ValidationUtterance],
    tokenizer: Tokenizer,
    ping: Ping,
) -> Scores:
    """Decode the utterances of this rank, and count their errors."""
    scores = Scores()
    for utterance in utterances:
        ping()
        tokens = list(decoder.nbest(utterance.log_probs, utterance.attention)[0].tokens)
        scores += count_errors(utterance.text, tokenizer.decode(tokens))
    return scores


def error_of(scores: Scores, *, by_words: bool) -> float:
    """Return the error that weights are chosen by: CER, plus WER in a language with words."""
    return scores.cer + (scores.wer if by_words else 0)


def used_weights(decoder: BeamDecoder) -> Iterator[str]:
    """Name the weights that have an effect."""
    models = decoder.language_models
    if models.words is not None and decoder.weights.word:
        yield from WORD_WEIGHTS
    if models.tokens is not None and decoder.decoder_type != "graph":
        yield from ("token", "token_bonus")
    if decoder.attention_rescoring:
        yield "attention"


def _drops_word_model(decoder: BeamDecoder, *, by_words: bool) -> bool:
    """Check whether to decode with the model of tokens only.

    If a language does not separate words, a model of words knows only whole sentences.
    """
    return not by_words and "token" in used_weights(decoder)


def _make_quick(decoder: BeamDecoder) -> BeamDecoder:
    """Return a faster decoder whose best weights are nearly the same.

    Its beam is smaller. A graph is built again for each setting, so its language model has only
    the orders with few n-grams.
    """
    quick = decoder.copy_with(beam_size=min(decoder.beam_size, TRIAL_BEAM_SIZE))
    word_lm = decoder.language_models.words
    if decoder.decoder_type != "graph" or word_lm is None:
        return quick
    sizes = np.cumsum([len(grams) for grams in word_lm.grams])
    num_orders = max(1, int((sizes <= MAX_TRIAL_NGRAMS).sum()))
    shorter = replace(word_lm, grams=word_lm.grams[:num_orders])
    return quick.copy_with(language_models=LanguageModels(words=shorter, tokens=None))


def _weights_at(
    names: Sequence[str], ranges: Mapping[str, tuple[float, float]], point: Float64s
) -> DecoderWeights:
    """Return the weights at a point of the unit cube."""
    values = {"word": 0.0}
    for name, share in zip(names, point.tolist(), strict=True):
        low, high = ranges[name]
        values[name] = round(low + share * (high - low), 3)
    return DecoderWeights(**values)


def _halton(count: int, base: int) -> Float64s:
    """Return the first numbers of Halton's sequence, which fill the unit interval evenly."""
    units = float(base) ** np.arange(7)  # more digits than NUM_TRIALS has in base 2
    numbers: Float64s = (np.arange(1, count + 1)[:, None] // units % base / units / base).sum(1)
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


# ---- confidences


def fit_confidences(
    aligner: WordAligner,
    decoder: BeamDecoder | None,
    utterances: Sequence[ValidationUtterance],
    *,
    by_words: bool,
    ping: Ping,
    quiet: bool,
) -> dict[str, FittedConfidence]:
    """Fit the confidences for greedy decoding and for a decoder; all ranks return the same."""
    vocabulary = aligner.tokenizer.vocabulary
    decoders: dict[str, BeamDecoder | GreedyDecoder] = {
        GREEDY: GreedyDecoder(vocab_size=vocabulary.size, blank=vocabulary.blank)
    }
    if decoder is not None:
        decoders[decoder.decoder_type] = decoder
    labeled: dict[str, list[LabeledWords]] = {name: [] for name in decoders}
    with progress_bar("fitting the confidence of words", len(utterances), quiet=quiet) as advance:
        for utterance in utterances:
            ping()
            advance(1)
            for name, one_decoder in decoders.items():
                beam = one_decoder.nbest(utterance.log_probs, utterance.attention)
                words = aligner.extract_features(utterance.log_probs, beam[0].tokens, beam)
                share = text_share(beam, aligner.tokenizer)
                labeled[name].append(
                    label_words(words, utterance.text, share=share, by_words=by_words)
                )
    fitted: dict[str, FittedConfidence] = {}
    for name, own in labeled.items():
        gathered = list(chain.from_iterable(gather_over_ranks(own)))
        characters = sum((one.characters for one in gathered), ErrorCounts())
        fitted[name] = replace(fit_confidence(gathered), cer=characters.rate)
    return fitted


class LabeledWords(NamedTuple):
    """The features of an utterance's decoded words, and which are right.

    text: the reference; share: of the beam's probability that has this text; errors: edits between
    the text and the reference, in words, or in characters for a language without spaces;
    characters: the edits in characters.
    """

    text: str
    features: dict[str, Float64s]
    right: list[bool]
    share: float = 1.0
    errors: int = 0
    characters: ErrorCounts = ErrorCounts()


def label_words(
    words: WordFeatures, reference: str, *, share: float = 1.0, by_words: bool = True
) -> LabeledWords:
    """Compare the decoded words of an utterance with its reference."""
    decoded = [word.text for word in words.words]
    right = word_correctness(reference.split(), decoded)
    scores = count_errors(reference, " ".join(decoded))
    errors = (scores.words if by_words else scores.characters).errors
    return LabeledWords(reference, words.features, right, share, errors, scores.characters)


def fit_confidence(labeled: Sequence[LabeledWords]) -> FittedConfidence:
    """Fit confidences to words and to whole utterances, independently of the order.

    Features and prior are fixed, so cross-validation only measures the fit.
    """
    labeled = sorted((words for words in labeled if words.right), key=_sort_key)
    lengths = [len(words.right) for words in labeled]
    right = np.array([is_right for words in labeled for is_right in words.right], np.bool_)
    names = [name for name in FEATURES if labeled and name in labeled[0].features]
    features = {name: np.concatenate([words.features[name] for words in labeled]) for name in names}
    fitted, predicted = _fit_and_predict(
        features, right, np.repeat(np.arange(len(labeled)), lengths)
    )
    if fitted.confidence is None:
        return fitted
    # The words of other audio are less certain than those that a confidence was fitted to, so
    # utterances are fitted to predictions.
    parts = np.split(predicted, np.cumsum(lengths)[:-1])
    return replace(fitted, utterances=_fit_utterances(labeled, [part.tolist() for part in parts]))


def _fit_utterances(
    labeled: Sequence[LabeledWords], word_confidences: Sequence[Sequence[float]]
) -> FittedConfidence:
    rows = [
        utterance_features(confidences, words.share)
        for words, confidences in zip(labeled, word_confidences, strict=True)
    ]
    features = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    errors = np.array([words.errors for words in labeled])
    indices = np.arange(len(rows))
    fitted, predicted = _fit_and_predict(features, errors == 0, indices, unit="utterances")
    if fitted.confidence is None:
        return fitted
    wrong_words = np.array([len(part) - sum(part) for part in word_confidences])
    extra = (errors.sum() - (1 - predicted).sum()) / ((1 - predicted) @ wrong_words)
    return replace(fitted, extra_errors=round(max(0.0, float(extra)), 4))


def _fit_and_predict(
    features: dict[str, Float64s], right: Bools, utterances: Counts, unit: str = "words"
) -> tuple[FittedConfidence, Float64s]:
    """Fit a confidence; return also predictions by confidences fitted to other utterances: (N,).

    utterances: the index of each word's utterance, (N,).
    """
    num_right = int(right.sum())
    predicted = np.zeros(len(right))
    if len({*utterances}) < 2 or min(num_right, len(right) - num_right) < MIN_RIGHT_AND_WRONG[unit]:
        return FittedConfidence(None, None, len(right), num_right, unit), predicted
    for fold in range(NUM_FOLDS):
        is_held_out = utterances % NUM_FOLDS == fold
        confidence = _fit(_select(features, ~is_held_out), right[~is_held_out])
        predicted[is_held_out] = confidence(_select(features, is_held_out))
    calibration = measure_calibration(predicted.tolist(), right.tolist())
    is_useful = calibration is not None and (calibration.NCE or 0.0) > 0
    fitted = _fit(features, right) if is_useful else None
    return FittedConfidence(fitted, calibration, len(right), num_right, unit), predicted


def _sort_key(labeled: LabeledWords) -> tuple[str, list[list[float]]]:
    return labeled.text, [values.tolist() for values in labeled.features.values()]


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

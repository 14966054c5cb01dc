"""Fit a decoder to validation data: the weights of its models, and confidences.

log-probabilities and reference texts -> a sample of them (`sample.py`)
-> errors with trial weights -> a quadratic function of the weights -> where it is lowest
-> confidences of words (`fit_confidence.py`)
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sbkit.base.arrays import Float64s
from sbkit.base.errors import DataError
from sbkit.base.messages import plural
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import WORD_WEIGHTS, Decoder, DecoderWeights
from sbkit.decoding.fit_confidence import FittedConfidence, fit_confidences
from sbkit.decoding.sample import ValidationUtterance
from sbkit.decoding.words import BEAM, GREEDY, WordAligner
from sbkit.distributed.ranks import gather_over_ranks
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.logs.progress import ping, progress_bar
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HALTON_BASES = (2, 3, 5, 7, 11, 13)
NUM_TRIALS = 64  # settings of the weights
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


@dataclass(frozen=True)
class FittedWeights:
    """The chosen weights, and the errors with them.

    by_words: False for a language without spaces between words, which has no WER.
    """

    weights: DecoderWeights
    errors: TextErrors
    by_words: bool = True

    def plain(self) -> dict[str, Any]:
        return {
            "weights": asdict(self.weights),
            "CER": self.errors.cer,
            **({"WER": self.errors.wer} if self.by_words else {}),
            "utterances": self.errors.utterances,
        }


@dataclass(frozen=True)
class FittedDecoder:
    """A decoder that was fitted to validation sets.

    decoder: None for greedy decoding; weights: None if they were not fitted; confidences: by
    decoder; splits: the names of the validation sets.
    """

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
        if cer <= greedy_cer:
            return ""
        return (
            f"the CER of the beam decoder, {100 * cer:.1f} %, is above that of greedy decoding, "
            f"{100 * greedy_cer:.1f} % ({', '.join(self.splits)}). Train longer, or choose the "
            "decoder greedy if characters matter more than words."
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
        """What a bundle stores of the confidences, as plain data."""
        return {name: fit.plain() for name, fit in self.confidences.items()}


def fit_decoder(
    decoder: BeamDecoder | None,
    aligner: WordAligner,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str],
    by_words: bool,
) -> FittedDecoder:
    """Fit the weights of a decoder, unless it has some, and the confidences of words.

    Args:
        decoder: None for greedy decoding, which has only confidences.
        aligner: extracts the features of words, with the decoder's model of words.
        utterances: this rank's share of `sample_utterances`.
        splits: the names of the validation sets.
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
    for name, fit in confidences.items():
        logger.info(f"confidence of words, {name}: {fit} ({sets})")
    fitted = FittedDecoder(decoder, weights, confidences, splits)
    if fitted.note:
        logger.info(fitted.note)
    return fitted


def fit_weights(
    decoder: BeamDecoder,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str] = (),
    by_words: bool = True,
) -> FittedWeights:
    """Choose weights with a low error, as `error_of` defines it.

    ``NUM_TRIALS`` settings, which fill the space of all weights evenly, are tried, and a quadratic
    function is fitted to their errors. The result is the mean of the ``NUM_AVERAGED`` settings
    where this function is lowest, because the fewest errors on a few hundred words are a matter of
    luck.

    Raises DataError if the validation sets are empty.
    """
    sets = ", ".join(splits)
    count = plural(sum(gather_over_ranks(len(utterances))), "utterance")
    logger.info(f"decoder: trying {NUM_TRIALS} settings of its weights on {count} ({sets})")
    names = decoder.used_weights
    # If a language does not separate words, a model of words knows only whole sentences.
    if not by_words and "token" in names:
        names = [name for name in names if name not in WORD_WEIGHTS]
    points = np.stack([_halton(base) for base in HALTON_BASES[: len(names)]], 1)
    quick_decoder = decoder.make_quick()
    trials = (quick_decoder.with_weights(_weights_at(names, point)) for point in points)
    num_decoded = (NUM_TRIALS + 1) * len(utterances)
    with progress_bar("trying weights of the decoder", num_decoded) as advance:

        def on_utterance() -> None:
            ping("tuning")
            advance(1)

        errors = count_all_errors(trials, utterances, decoder.tokenizer, on_utterance)
        if not errors[0].utterances:
            raise DataError(
                "The weights of a decoder are fitted to a validation set, but it is empty. Write "
                "the weights into the YAML, or name a set."
            )
        smooth = _fit_quadratic(
            points, np.array([error_of(trial, by_words=by_words) for trial in errors])
        )
        center = points[smooth.argsort(kind="stable")[:NUM_AVERAGED]].mean(0)
        best = decoder.with_weights(_weights_at(names, center))
        (best_errors,) = count_all_errors([best], utterances, decoder.tokenizer, on_utterance)
    values = asdict(best.weights)
    text = ", ".join(f"{name} {values[name]:g}" for name in best.used_weights)
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
    own_errors: list[TextErrors] = []
    for decoder in decoders:
        errors = TextErrors()
        for utterance in utterances:
            on_utterance()
            tokens = list(decoder.nbest(utterance.log_probs, utterance.attention)[0].tokens)
            errors += count_errors(utterance.text, tokenizer.decode(tokens))
        own_errors.append(errors)
    return [
        sum(shares, TextErrors()) for shares in zip(*gather_over_ranks(own_errors), strict=True)
    ]


def error_of(errors: TextErrors, *, by_words: bool) -> float:
    """Return the error that weights are chosen by: CER, plus WER in a language with words."""
    return errors.cer + (errors.wer if by_words else 0)


def _weights_at(names: Sequence[str], point: Float64s) -> DecoderWeights:
    """Return the weights at a point of the unit cube."""
    values = {"word": 0.0}
    for name, share in zip(names, point.tolist(), strict=True):
        low, high = WEIGHT_RANGES[name]
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

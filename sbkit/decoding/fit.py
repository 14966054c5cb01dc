"""Fit a decoder to validation data: the weights of its models, and confidences.

log-probabilities and reference texts -> a sample of them (`sample.py`) -> weights of the decoder
(`fit_weights.py`) -> confidences of words and utterances (`fit_confidence.py`)
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbkit.decoding.decoder import LanguageModelDecoder
from sbkit.decoding.fit_confidence import FittedConfidence, fit_confidences
from sbkit.decoding.fit_weights import FittedWeights, fit_weights
from sbkit.decoding.sample import ValidationUtterance
from sbkit.decoding.words import GREEDY, WordAligner
from sbkit.logs.progress import Ping, no_ping

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FittedDecoder:
    """A decoder that was fitted to validation sets.

    decoder: None for greedy decoding; weights: None if they were not fitted; confidences: by
    decoder type; splits: the names of the validation sets.
    """

    decoder: LanguageModelDecoder | None
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
            f"decoding, {100 * greedy_cer:.1f} % ({', '.join(self.splits)}). Train longer, or "
            "choose the decoder greedy if characters matter more than words."
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
    decoder: LanguageModelDecoder | None,
    aligner: WordAligner,
    utterances: Sequence[ValidationUtterance],
    *,
    splits: Sequence[str],
    by_words: bool,
    ping: Ping = no_ping,
    quiet: bool = False,
) -> FittedDecoder:
    """Fit the weights of a decoder, unless it has some, and the confidences of words.

    Args:
        decoder: None for greedy decoding, which has only confidences.
        aligner: extracts the features of words, with the decoder's model of words.
        utterances: this rank's share of `sample_utterances`.
        splits: the names of the validation sets.
        by_words: False for a language without spaces between words.
        ping: called before each utterance.
        quiet: show no progress.
    """
    word_lm = None if decoder is None else decoder.language_models.words
    aligner = replace(aligner, word_lm=word_lm)
    weights = None
    if decoder is not None and decoder.needs_tuning and decoder.used_weights:
        weights = fit_weights(
            decoder,
            utterances,
            splits=splits,
            by_words=by_words,
            ping=ping,
            quiet=quiet,
        )
        decoder = decoder.with_weights(weights.weights)
    confidences = fit_confidences(
        aligner,
        decoder,
        utterances,
        by_words=by_words,
        ping=ping,
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

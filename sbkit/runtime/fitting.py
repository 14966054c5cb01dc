"""Fit the decoder of a bundle to validation sets.

rows -> log-probabilities of a sample -> errors of the present decoder -> weights and confidences of
the new one -> its errors
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import datasets

from sbkit.base.units import seconds_to_samples
from sbkit.data.splits import sample_counts
from sbkit.decoding.decoder import LanguageModelDecoder
from sbkit.decoding.fit import fit_decoder
from sbkit.decoding.fit_weights import count_own_errors, error_of
from sbkit.decoding.sample import ValidationUtterance, order_of, sample_utterances
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.wer import UNIT_OF_RATE, Scores
from sbkit.logs.progress import progress_bar
from sbkit.runtime.test_sets import read_whole_clips
from sbkit.runtime.torch_model import TorchBundle

logger = logging.getLogger(__name__)

MAX_SECONDS = 2400.0  # of audio: the tokens of a sample, if each frame of 40 ms has one


def _encode_validation(
    bundle: TorchBundle, sets: Mapping[str, datasets.Dataset], *, with_attention: bool
) -> Iterator[ValidationUtterance]:
    """Compute the log-probabilities of at most MAX_SECONDS of each validation set."""
    rate = bundle.config.sample_rate
    for rows in sets.values():
        ids = rows["id"][:]
        samples = sample_counts(rows)
        order = sorted(range(len(rows)), key=lambda row: order_of(ids[row]))
        fits = samples[order].cumsum() <= seconds_to_samples(MAX_SECONDS, rate)
        for batch in read_whole_clips(rows.select(sorted(order[: max(1, fits.sum())])), rate):
            clips = [*batch.values()]
            encoded_clips = bundle.model.encode([clip["audio"] for clip in clips])
            for clip, encoded in zip(clips, encoded_clips, strict=True):
                yield ValidationUtterance(
                    encoded.log_probs,
                    clip["text"],
                    bundle.attention_decoder(encoded) if with_attention else None,
                    clip["id"],
                )


def fit_bundle(
    bundle: TorchBundle,
    decoder: LanguageModelDecoder,
    sets: Mapping[str, datasets.Dataset],
    folder: Path,
) -> bool:
    """Fit a decoder to validation sets, and write its files into a folder.

    Returns whether it makes fewer errors there than the decoder of the bundle.
    """
    by_words = bundle.config.has_words
    splits = ", ".join(sets)
    current = bundle.decoder_pool.decoder
    rescores = bundle.decoder is not None and bundle.decoder.attention_rescoring
    with_attention = decoder.attention_rescoring or rescores
    utterances = sample_utterances(
        _encode_validation(bundle, sets, with_attention=with_attention), bundle.tokenizer.silent
    )
    with progress_bar("decoding as before", len(utterances)) as advance:
        before = count_own_errors(current.decoder, utterances, bundle.tokenizer, lambda: advance(1))
    decoder_type = GREEDY if bundle.decoder is None else bundle.decoder.decoder_type
    logger.info(f"before ({decoder_type}): {_describe(before, by_words)} ({splits})")
    fitted = fit_decoder(
        decoder,
        replace(current.aligner, word_lm=decoder.language_models.words),
        utterances,
        splits=[*sets],
        by_words=by_words,
    )
    fitted.write(folder)
    assert fitted.weights is not None  # the new decoder has none yet, and uses some
    after = fitted.weights.scores
    logger.info(f"after ({decoder.decoder_type}): {_describe(after, by_words)} ({splits})")
    return error_of(after, by_words=by_words) < error_of(before, by_words=by_words)


def _describe(scores: Scores, by_words: bool) -> str:
    return ", ".join(
        f"{rate} {100 * counts.rate:.1f} % ({counts} {UNIT_OF_RATE[rate]})"
        for rate, counts in reversed(scores.counts_by_rate(include_wer=by_words).items())
    )

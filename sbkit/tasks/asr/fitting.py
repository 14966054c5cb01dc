"""Fit the decoder of a recognizer to validation sets, with its language models.

validation sets -> log-probabilities of a sample -> weights of the decoder, confidences of words

Legend: U frames, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from sbkit.audio.segments import max_unsegmented_samples
from sbkit.base.errors import ConfigError
from sbkit.base.units import seconds_to_samples
from sbkit.config.keys import with_defaults
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import Splits, read_column, sample_counts
from sbkit.decoding.beam import BeamDecoder, declared_decoder
from sbkit.decoding.fit import (
    FittedDecoder,
    ValidationUtterance,
    count_all_errors,
    fit_decoder,
    order_of,
    sample_utterances,
)
from sbkit.decoding.word_times import BEAM, GREEDY
from sbkit.distributed.ranks import world_size
from sbkit.evaluate.wer import ERROR_RATES, TextErrors
from sbkit.lm.language_models import TOKENS, WORDS, load_language_models, save, tokenizer_digest
from sbkit.lm.training import LmText, LmTextEncoder, replace_language_models
from sbkit.logs.metric import percent
from sbkit.logs.progress import ping, progress_bar
from sbkit.runtime.score_sets import BATCH_SECONDS, read_whole_clips
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle

logger = logging.getLogger(__name__)

# The most audio of a validation set: it has enough tokens if each frame of 40 ms has one.
MAX_FITTED_SECONDS = 2400.0


def sample_validation(
    bundle: AsrBundle[TorchModel],
    sets: Mapping[str, datasets.Dataset],
    *,
    with_attention: bool,
    batch_seconds: float = BATCH_SECONDS,
) -> list[ValidationUtterance]:
    """Return this rank's share of a sample of the validation sets, with log-probabilities.

    At most MAX_FITTED_SECONDS of each set are encoded. Long recordings are left out, because a
    decoder is fitted to utterances.

    with_attention: whether the attention decoder rescores, and so needs the encoder's states.
    """
    rate = bundle.config.sample_rate
    longest = max_unsegmented_samples(batch_seconds, rate)
    title, total = "encoding the validation sets", sum(map(len, sets.values()))
    with progress_bar(title, total) as advance:

        def encode() -> Iterator[ValidationUtterance]:
            for rows in sets.values():
                ids = rows["id"][:]
                samples = sample_counts(rows)
                order = [row for row in range(len(rows)) if samples[row] <= longest]
                order.sort(key=lambda row: order_of(ids[row]))
                fits = samples[order].cumsum() <= seconds_to_samples(MAX_FITTED_SECONDS, rate)
                selected = rows.select(sorted(order[: max(1, fits.sum())]))
                for batch in read_whole_clips(selected, rate, batch_seconds=batch_seconds):
                    clips = [*batch.values()]
                    advance(world_size() * len(clips))
                    if ping("encoding", [clip["id"] for clip in clips]):
                        return
                    encoded_clips = bundle.encode([clip["audio"] for clip in clips], clips)
                    for clip, encoded in zip(clips, encoded_clips, strict=True):
                        # Copied, because a view would keep the outputs of the whole batch.
                        encoded = replace(encoded, states=encoded.states.clone())
                        yield ValidationUtterance(
                            encoded.log_probs.copy(),
                            clip["text"],
                            bundle.attention_scorer(encoded) if with_attention else None,
                            clip["id"],
                        )

        return sample_utterances(encode(), bundle.tokenizer.silent_ids)


def fit_declared_decoder(
    bundle: AsrBundle[TorchModel],
    hparams: Mapping[str, Any],
    sets: Mapping[str, datasets.Dataset],
    *,
    batch_seconds: float,
    on_sampled: Callable[[], object],
) -> FittedDecoder:
    """Fit the decoder of a YAML, and the confidences of words, to a model that was just trained.

    on_sampled: called when the validation sets are encoded, and perhaps were not to their end.
    """
    decoder = declared_decoder(hparams)
    bundle = replace(bundle, decoder_tokenizer=hparams.get("decoder_tokenizer"))
    rescores = decoder is not None and decoder.attention_rescoring
    sample = sample_validation(bundle, sets, with_attention=rescores, batch_seconds=batch_seconds)
    on_sampled()
    aligner = bundle.decoder_pool.decoder.aligner
    by_words = bundle.config.has_words
    return fit_decoder(decoder, aligner, sample, splits=[*sets], by_words=by_words)


# ---- another decoder


@dataclass(frozen=True, kw_only=True)
class TuningData:
    """What another decoder is fitted to.

    sets: the validation sets.
    settings: of the run; {} for a bundle.
    splits: of the run; None for a bundle.
    tables: the columns and the encoding of texts.
    """

    sets: Mapping[str, datasets.Dataset]
    settings: Mapping[str, Any] = field(default_factory=dict)
    splits: Splits | None = None
    tables: Mapping[str, Any] = field(default_factory=dict)


def fit_another_decoder(
    bundle: AsrBundle[TorchModel],
    data: TuningData,
    models: Path,
    *,
    lm_text: str | Sequence[str] | None = None,
    word_lm_order: int | None = None,
    token_lm_order: int | None = None,
    beam_size: int | None = None,
    attention_rescoring: bool | None = None,
) -> FittedDecoder:
    """Fit another decoder; an option of None is as in the present one.

    models: the file of the language models, which is written, or changed if there is one.
    lm_text: text of the language models, a list of texts or an ARPA file.
    word_lm_order, token_lm_order: n of the n-grams; 0 for none.
    """
    new_orders = {WORDS: word_lm_order, TOKENS: token_lm_order}
    orders = {name: order for name, order in new_orders.items() if order is not None}
    needs_models = [*new_orders.values()] != [0, 0]
    if not needs_models:
        models.unlink(missing_ok=True)
    elif lm_text is not None or orders:
        declared = with_defaults(data.settings)["lm_text"] if lm_text is None else lm_text
        text = _open_text(declared, bundle, data)
        encoder = LmTextEncoder(tokenizer=bundle.tokenizer, table=bundle.config.text_table)
        logger.info("\n".join(replace_language_models(models, text, orders, encoder)))
    if not models.exists():
        save({}, models, metadata={"tokenizer": tokenizer_digest(bundle.tokenizer)})
    decoder = make_decoder(bundle, data.settings, models, beam_size, attention_rescoring)
    if needs_models and not decoder.used_weights:
        raise ConfigError(
            "`sbkit tune` fits the weights of language models, but there is none. Set "
            "`word_lm_order` to 3, or both orders to 0."
        )
    return _fit(bundle, decoder, data.sets)


def _open_text(
    declared: str | Sequence[str] | None,
    bundle: AsrBundle[TorchModel],
    data: TuningData,
) -> LmText:
    """Open the text of the language models: the declared one, or the transcripts of a run.

    Sentences of the evaluated sets are left out.
    """
    splits = data.splits
    lm_text = LmText.from_setting(declared)
    if lm_text.files:
        evaluated = data.sets if splits is None else {**splits.evaluated(), **data.sets}
        table = bundle.config.text_table
        sentences = partial(read_sentences, lm_text.files, table, data.tables)
        held_out = {name: read_column(rows, "text") for name, rows in evaluated.items()}
        return replace(lm_text, sentences=sentences, held_out=held_out)
    if splits is not None:
        return replace(lm_text, sentences=partial(read_column, splits.train, "text"))
    if lm_text.arpa is None:
        raise ConfigError("A bundle has no transcripts. Name a text with --lm-text.")
    return lm_text


def make_decoder(
    bundle: AsrBundle[TorchModel],
    settings: Mapping[str, Any],
    language_models: Path,
    beam_size: int | None,
    attention_rescoring: bool | None,
) -> BeamDecoder:
    """Make the new decoder, without weights; an argument of None is as in the current one.

    settings: of the run; {} for a bundle.
    """
    is_trained = "ctc_weight" not in settings or settings["ctc_weight"] < 1
    has_attention = bundle.model.network.has_decoder and is_trained
    if attention_rescoring and not has_attention:
        raise ConfigError("`attention_rescoring` needs a trained attention decoder.")
    rescores = attention_rescoring if has_attention else False
    changes = {"beam_size": beam_size, "attention_rescoring": rescores}
    current = settings if bundle.decoder is None else bundle.decoder.plain()
    decoder_settings = {name: current[name] for name in changes if name in current}
    decoder_settings |= {name: value for name, value in changes.items() if value is not None}
    models = load_language_models(language_models, bundle.tokenizer)
    return BeamDecoder(tokenizer=bundle.tokenizer, language_models=models, **decoder_settings)


def _fit(
    bundle: AsrBundle[TorchModel], decoder: BeamDecoder, sets: Mapping[str, datasets.Dataset]
) -> FittedDecoder:
    by_words = bundle.config.has_words
    splits = ", ".join(sets)
    current = bundle.decoder_pool.decoder
    rescores = bundle.decoder is not None and bundle.decoder.attention_rescoring
    sample = sample_validation(bundle, sets, with_attention=decoder.attention_rescoring or rescores)
    with progress_bar("decoding as before", len(sample)) as advance:
        (before,) = count_all_errors(
            [current.decoder], sample, bundle.tokenizer, lambda: advance(1)
        )
    name = GREEDY if bundle.decoder is None else BEAM
    logger.info(f"before ({name}): {_describe(before, by_words)} ({splits})")
    fitted = fit_decoder(decoder, current.aligner, sample, splits=[*sets], by_words=by_words)
    if fitted.weights is not None:
        after = fitted.weights.errors
    else:
        (after,) = count_all_errors([decoder], sample, bundle.tokenizer)
    logger.info(f"after ({BEAM}): {_describe(after, by_words)} ({splits})")
    return fitted


def _describe(errors: TextErrors, by_words: bool) -> str:
    return ", ".join(
        f"{rate} {percent(counts.rate)} ({counts} {ERROR_RATES[rate].units})"
        for rate, counts in reversed(errors.counts_by_rate(by_words=by_words).items())
    )

"""Fit another decoder to a validation set, and write a new bundle with it, as `sbkit tune` does.

run or bundle -> log-probabilities of the validation set -> errors of the present decoder
-> new decoder (language models, weights, confidences) -> its errors -> new bundle
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_YAML, require_writable
from sbkit.bundle.config import CONFIG_FILE
from sbkit.config.hparams import RunSpec
from sbkit.config.keys import with_defaults
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import Splits, read_column
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.fit import FittedDecoder, count_all_errors, fit_decoder
from sbkit.decoding.word_times import BEAM, GREEDY
from sbkit.evaluate.wer import ERROR_RATES, TextErrors
from sbkit.export.export import exported_bundle, require_new, set_decoder
from sbkit.lm.language_models import TOKENS, WORDS, load_language_models, save, tokenizer_digest
from sbkit.lm.training import LmText, LmTextEncoder, replace_language_models
from sbkit.logs.metric import percent
from sbkit.logs.progress import progress_bar
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_sets import name_of, prepare_user_set, table_settings
from sbkit.runtime.scoring import sample_validation
from sbkit.runtime.torch_model import TorchBundle
from sbkit.train.recipe import load_trusted_recipe
from sbkit.train.setup import declare_run, prepare_splits

logger = logging.getLogger(__name__)


def tune(
    model: Path,
    *,
    out: Path,
    spec: RunSpec | None = None,
    data: Path | None = None,
    lm_text: str | Sequence[str] | None = None,
    word_lm_order: int | None = None,
    token_lm_order: int | None = None,
    beam_size: int | None = None,
    attention_rescoring: bool | None = None,
    columns: Mapping[str, Any] | None = None,
    encoding: str | None = None,
    user_modules: frozenset[str] = frozenset(),
) -> Path:
    """Fit another decoder to a validation set; return the folder of a new bundle with it.

    out: the folder of the new bundle.
    spec: of the run; by default the YAML in its folder.
    data: a table, as the validation set; by default the run's own sets.
    lm_text: text of the language models, a list of texts or an ARPA file.
    word_lm_order, token_lm_order: n of the n-grams; 0 for none.
    columns, encoding: of the table and the texts.
    """
    is_bundle = (model / CONFIG_FILE).exists()
    if is_bundle and data is None:
        raise ConfigError(
            f"To tune a bundle, --data is needed: sbkit tune {model} --data dev.csv --out NEW"
        )
    require_new(out.resolve(), model=model)
    require_writable(out.resolve().parent, option="--out")
    with exported_bundle(model, user_modules) as exported, TemporaryDirectory() as folder:
        bundle = load_bundle(exported, user_modules=user_modules)
        bundle.task.require_prediction("text", command="tune")
        bundle.task.require_frames("`sbkit tune`")
        if spec is None and not is_bundle:
            spec = declare_run(model / RUN_YAML, {})
        splits: Splits | None = None
        if spec is not None:
            splits = prepare_splits(spec, load_trusted_recipe(spec, user_modules))
        settings: Mapping[str, Any] = {} if spec is None else spec.settings
        tables = table_settings(model, columns=columns, encoding=encoding)
        sets: Mapping[str, datasets.Dataset]
        if data is not None:
            sets = {name_of(data): prepare_user_set(bundle, data, tables)}
        else:
            assert splits is not None  # `--data` is required for a bundle
            sets = splits.valid
        models = Path(folder, LANGUAGE_MODELS_FILE)
        for home in (exported, model):
            if (home / LANGUAGE_MODELS_FILE).is_file():
                shutil.copyfile(home / LANGUAGE_MODELS_FILE, models)
                break
        new_orders = {WORDS: word_lm_order, TOKENS: token_lm_order}
        orders = {name: order for name, order in new_orders.items() if order is not None}
        needs_models = [*new_orders.values()] != [0, 0]
        if not needs_models:
            models.unlink(missing_ok=True)
        elif lm_text is not None or orders:
            declared = with_defaults(settings)["lm_text"] if lm_text is None else lm_text
            text = _open_text(declared, bundle, splits, tables, sets)
            encoder = LmTextEncoder(tokenizer=bundle.tokenizer, table=bundle.config.text_table)
            logger.info("\n".join(replace_language_models(models, text, orders, encoder)))
        if not models.exists():
            save({}, models, metadata={"tokenizer": tokenizer_digest(bundle.tokenizer)})
        decoder = _make_decoder(bundle, settings, models, beam_size, attention_rescoring)
        if needs_models and not decoder.used_weights:
            raise ConfigError(
                "`sbkit tune` fits the weights of language models, but there is none. Set "
                "`word_lm_order` to 3, or both orders to 0."
            )
        set_decoder(exported, out.resolve(), _fit(bundle, decoder, sets), models)
    logger.info(f"written with the new decoder: {out}")
    return out


# ---- another decoder


def _open_text(
    declared: str | Sequence[str] | None,
    bundle: TorchBundle,
    splits: Splits | None,
    tables: Mapping[str, Any],
    sets: Mapping[str, datasets.Dataset],
) -> LmText:
    """Open the text of the language models: the declared one, or the transcripts of a run.

    tables: the columns and the encoding of texts.
    sets: their sentences are left out, as those of the evaluated splits.
    """
    lm_text = LmText.from_setting(declared)
    if lm_text.files:
        evaluated = sets if splits is None else {**splits.evaluated(), **sets}
        table = bundle.config.text_table
        sentences = partial(read_sentences, lm_text.files, table, tables)
        held_out = {name: read_column(rows, "text") for name, rows in evaluated.items()}
        return replace(lm_text, sentences=sentences, held_out=held_out)
    if splits is not None:
        return replace(lm_text, sentences=partial(read_column, splits.train, "text"))
    if lm_text.arpa is None:
        raise ConfigError("A bundle has no transcripts. Name a text with --lm-text.")
    return lm_text


def _make_decoder(
    bundle: TorchBundle,
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


# ---- old and new


def _fit(
    bundle: TorchBundle, decoder: BeamDecoder, sets: Mapping[str, datasets.Dataset]
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

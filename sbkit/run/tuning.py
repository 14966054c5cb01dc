"""Fit another decoder to a validation set, and keep the better one, as `sbkit tune` does.

run or bundle -> log-probabilities of the validation set -> errors of the present decoder
-> new decoder (language models, weights, confidences) -> its errors -> written if they are fewer
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_YAML, require_writable
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.folder import locked_folder
from sbkit.checkpoint.run_config import BUNDLE, require_trusted
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import Splits, read_column
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.fit import FittedDecoder, count_all_errors, error_of, fit_decoder
from sbkit.decoding.word_times import BEAM, GREEDY
from sbkit.evaluate.report import REPORT
from sbkit.evaluate.wer import ERROR_RATES, TextErrors
from sbkit.export.export import exported_bundle, require_replaceable, set_decoder
from sbkit.lm.language_models import TOKENS, WORDS, digest_of, load_language_models, save
from sbkit.lm.training import LmText, LmTextEncoder, replace_language_models
from sbkit.logs.metric import percent
from sbkit.logs.progress import progress_bar
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_sets import name_of, prepare_source, table_settings
from sbkit.runtime.scoring import sample_validation
from sbkit.runtime.torch_model import TorchBundle
from sbkit.train.setup import RunValues, prepare_splits, read_values

logger = logging.getLogger(__name__)

EARLIER_BUNDLE = "earlier_bundle"  # a folder of a run: the bundle before the last `sbkit tune`


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How another decoder differs from that of the model, and what it is fitted to.

    data: a table, as the validation set; by default the run's own sets.
    out: the folder of a new bundle; by default the bundle of the run is replaced.
    force: replace even a better decoder.
    lm_text: text of the language models, a list of texts or an ARPA file.
    word_lm_order, token_lm_order: n of the n-grams; 0 for none.
    columns, encoding: of the table and the texts.
    """

    data: Path | None = None
    out: Path | None = None
    force: bool = False
    lm_text: str | Sequence[str] | None = None
    word_lm_order: int | None = None
    token_lm_order: int | None = None
    beam_size: int | None = None
    attention_rescoring: bool | None = None
    columns: Mapping[str, Any] | None = None
    encoding: str | None = None
    user_modules: frozenset[str] = frozenset()


def tune(model: Path, options: TuningOptions, values: RunValues | None = None) -> None:
    """Fit another decoder to a validation set; write it to ``out``, or into a run if better.

    values: of the run; by default those of the YAML in its folder.
    """
    is_bundle = (model / CONFIG_FILE).exists()
    out = options.out
    if is_bundle and (options.data is None or out is None):
        missing = "--data" if options.data is None else "--out"
        raise ConfigError(
            f"To tune a bundle, {missing} is needed: sbkit tune {model} --data dev.csv --out NEW"
        )
    if out is not None:
        if out.resolve() == model.resolve():
            raise ConfigError(f"--out must be a new folder, but is {model} itself.")
        require_replaceable(out)
        require_writable(out.parent, option="--out")
    with (
        nullcontext() if is_bundle else locked_folder(model),  # so that nothing trains it meanwhile
        exported_bundle(model, options.user_modules) as source,
        TemporaryDirectory() as folder,
    ):
        bundle = load_bundle(source, user_modules=options.user_modules)
        bundle.task.require_prediction("text", command="tune")
        bundle.task.require_frames("`sbkit tune`")
        if values is None and not is_bundle:
            values = read_values(model / RUN_YAML, {})
        splits: Splits | None = None
        if values is not None:
            require_trusted(values.settings, values.given_keys, options.user_modules)
            splits = prepare_splits(values, values.load_recipe())
        tables = table_settings(model, options)
        sets: Mapping[str, datasets.Dataset]
        if options.data is not None:
            sets = {name_of(options.data): prepare_source(bundle, options.data, tables)}
        else:
            assert splits is not None  # `--data` is required for a bundle
            sets = splits.valid
        models = Path(folder, LANGUAGE_MODELS_FILE)
        for home in (source, model):
            if (home / LANGUAGE_MODELS_FILE).is_file():
                shutil.copyfile(home / LANGUAGE_MODELS_FILE, models)
                break
        settings: Mapping[str, Any] = {} if values is None else values.settings
        _replace_language_models(models, bundle, splits, settings, options, tables, sets)
        decoder = _make_decoder(bundle, settings, options, models)
        fitted, is_better = _fit(bundle, decoder, sets)
        if out is not None:
            set_decoder(source, out.resolve(), fitted, models)
            logger.info(f"written with the new decoder: {out}")
        elif is_better or options.force:
            earlier = model / EARLIER_BUNDLE
            shutil.rmtree(earlier, ignore_errors=True)
            if (model / BUNDLE).exists():
                shutil.copytree(model / BUNDLE, earlier, symlinks=True)
            set_decoder(source, model / BUNDLE, fitted, models)
            (model / REPORT).unlink(missing_ok=True)  # of the earlier decoder
            logger.info(
                f"The bundle of {model} has the new decoder; the earlier one is {earlier}. Measure "
                "it by `test()` of the run or the command that trained it, which replaces the "
                f"results, or elsewhere: sbkit score {model} --out DIR"
            )
        else:
            logger.info(
                f"{model} keeps its decoder, because the new one is no better. To use the new one "
                "anyway, set `force`, or name a new folder as `out`."
            )


# ---- another decoder


def _replace_language_models(
    file: Path,
    bundle: TorchBundle,
    splits: Splits | None,
    settings: Mapping[str, Any],
    options: TuningOptions,
    tables: Mapping[str, Any],
    sets: Mapping[str, datasets.Dataset],
) -> None:
    """Train or read the language models that the options ask for; the others in the file stay.

    splits, settings: of a run, whose `lm_text` or transcripts are the text without `--lm-text`.
    tables: the columns and the encoding of texts.
    """
    new_orders = {WORDS: options.word_lm_order, TOKENS: options.token_lm_order}
    orders = {name: order for name, order in new_orders.items() if order is not None}
    if options.lm_text is not None or orders:
        if options.lm_text is None and splits is None:
            raise ConfigError("A bundle has no transcripts. Name a text with --lm-text.")
        declared = settings.get("lm_text")
        lm_text = LmText.from_setting(declared if options.lm_text is None else options.lm_text)
        table = bundle.config.text_table
        if lm_text.files:
            evaluated = sets if splits is None else {**splits.evaluated(), **sets}
            sentences = partial(read_sentences, lm_text.files, table, tables)
            held_out = {name: read_column(rows, "text") for name, rows in evaluated.items()}
            lm_text = replace(lm_text, sentences=sentences, held_out=held_out)
        elif splits is not None:
            lm_text = replace(lm_text, sentences=partial(read_column, splits.train, "text"))
        text_encoder = LmTextEncoder(tokenizer=bundle.tokenizer, table=table)
        logger.info("\n".join(replace_language_models(file, lm_text, orders, text_encoder)))
    if not file.exists():
        save({}, file, metadata={"tokenizer": digest_of(bundle.tokenizer)})


def _make_decoder(
    bundle: TorchBundle, settings: Mapping[str, Any], options: TuningOptions, language_models: Path
) -> BeamDecoder:
    """Make the new decoder, without weights: like the current one, except for the options.

    settings: of the run; {} for a bundle.
    """
    has_attention = bundle.model.network.seq_lin is not None and settings.get("ctc_weight", 0) < 1
    if options.attention_rescoring and not has_attention:
        raise ConfigError("`attention_rescoring` needs a trained attention decoder.")
    rescores = options.attention_rescoring if has_attention else False
    changes = {"beam_size": options.beam_size, "attention_rescoring": rescores}
    current = settings if bundle.decoder is None else bundle.decoder.plain()
    decoder_settings = {name: current[name] for name in changes if name in current}
    decoder_settings |= {name: value for name, value in changes.items() if value is not None}
    models = load_language_models(language_models, bundle.tokenizer)
    decoder = BeamDecoder(tokenizer=bundle.tokenizer, language_models=models, **decoder_settings)
    if not decoder.used_weights:
        raise ConfigError(
            "`sbkit tune` fits the weights of language models, but there is none. Set "
            "`word_lm_order` to 3."
        )
    return decoder


# ---- old and new


def _fit(
    bundle: TorchBundle, decoder: BeamDecoder, sets: Mapping[str, datasets.Dataset]
) -> tuple[FittedDecoder, bool]:
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
    assert fitted.weights is not None  # the new decoder has none yet, and uses some
    after = fitted.weights.errors
    logger.info(f"after ({BEAM}): {_describe(after, by_words)} ({splits})")
    return fitted, error_of(after, by_words=by_words) < error_of(before, by_words=by_words)


def _describe(errors: TextErrors, by_words: bool) -> str:
    return ", ".join(
        f"{rate} {percent(counts.rate)} ({counts} {ERROR_RATES[rate].units})"
        for rate, counts in reversed(errors.counts_by_rate(by_words=by_words).items())
    )

"""`sbkit tune`: fit another decoder to a validation set, and keep the better one.

run or bundle -> log-probabilities of the validation set -> errors of the present decoder
-> new decoder (language models, weights, confidences) -> its errors -> written if they are fewer
"""

import logging
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets

from sbkit.base.errors import ConfigError
from sbkit.base.files import require_writable, write_bytes_atomically
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE
from sbkit.checkpoint.folder import lock_folder
from sbkit.checkpoint.provenance import make_provenance, read_json
from sbkit.checkpoint.run_config import RESOLVED_YAML
from sbkit.commands.score import table_knobs
from sbkit.config.overrides import parse_overrides
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import read_column
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.declared import make_decoder
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS_FILE, LanguageModelDecoder
from sbkit.decoding.words import CONFIDENCE_FILE
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.export import (
    CARD_FILE,
    change_config,
    exported_bundle,
    replacing_bundle,
    require_replaceable,
)
from sbkit.export.model_card import USES
from sbkit.lm.language_models import (
    TOKENS,
    WORDS,
    LmText,
    digest_of,
    load_language_models,
    replace_language_models,
    save,
)
from sbkit.runtime.fitting import fit_bundle
from sbkit.runtime.test_sets import name_of, prepare_source
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.text.tokenizer import TOKENIZER_FILE
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

DECODER_FILES = (DECODER_FILE, CONFIDENCE_FILE, LANGUAGE_MODELS_FILE)
EARLIER_DECODER = "earlier_decoder"  # a folder of a run: the decoder before the last `sbkit tune`
FORMATS_WITHOUT_DECODER = ("onnx", "torch")


def tune(options: Namespace) -> None:
    """Fit another decoder to a validation set; write it to ``--out``, or into a run if better.

    Raises SbkitError if the model is not a recognizer, or the options do not fit it.
    """
    model, user_modules = options.model, options.user_modules
    is_bundle = (model / CONFIG_FILE).exists()
    _check_options(options, is_bundle=is_bundle)
    with exported_bundle(model, user_modules) as source, TemporaryDirectory() as folder:
        bundle = load_bundle(source, user_modules=user_modules)
        bundle.task.require_prediction("text", command="tune")
        new = Path(folder)
        run = None if is_bundle else Run(model / RESOLVED_YAML, _overrides(options, new))
        if run is not None:
            lock_folder(model)  # so that nothing trains it meanwhile
            run.check_ranges()
        if run is not None and options.data is None:
            sets: Mapping[str, datasets.Dataset] = run.prepare_splits().valid
        else:
            sets = {
                name_of(options.data): prepare_source(bundle, options.data, table_knobs(options))
            }
        _make_language_models(bundle, run, options, sets, new / LANGUAGE_MODELS_FILE)
        decoder = _make_decoder(bundle, run, options, new / LANGUAGE_MODELS_FILE)
        is_better = fit_bundle(bundle, decoder, sets, new)
        if options.out is not None:
            _copy_bundle(source, new, options.out.resolve())
            logger.info(f"written with the new decoder: {options.out}")
        elif is_better or options.force:
            _replace(model, new)
            logger.info(
                f"{model} has the new decoder; the earlier one is in {model / EARLIER_DECODER}, "
                f"and the results are still its own. Measure again: sbkit score {model} --out DIR"
            )
        else:
            logger.info(
                f"{model} keeps its decoder, because the new one is no better. To use the new one "
                "anyway, pass --force, or --out DIR for a bundle."
            )


def _check_options(options: Namespace, *, is_bundle: bool) -> None:
    model, out = options.model, options.out
    if is_bundle and (options.data is None or out is None):
        missing = "--data" if options.data is None else "--out"
        raise ConfigError(
            "To tune a bundle, name the data and a folder for the new bundle; "
            f"{missing} is missing: sbkit tune {model} --data dev.csv --out NEW"
        )
    if out is not None:
        if out.resolve() == model.resolve():
            raise ConfigError(f"--out must be a new folder, but is {model} itself.")
        require_replaceable(out)
        require_writable(out.parent, option="--out")


def _overrides(options: Namespace, folder: Path) -> dict[str, object]:
    """Return the overrides that make the recipe train the language models in ``folder``."""
    orders = {f"{name[:-1]}_lm_order": order for name, order in _orders(options).items()}
    text = {} if options.lm_text is None else parse_overrides([f"--lm_text={options.lm_text}"])
    return {"output_folder": str(folder), **orders, **text}


def _orders(options: Namespace) -> dict[str, int]:
    """Return the n-gram orders among the options, by language model."""
    orders = {WORDS: options.word_lm_order, TOKENS: options.token_lm_order}
    return {name: order for name, order in orders.items() if order is not None}


# ---- another decoder


def _make_language_models(
    bundle: TorchBundle,
    run: Run | None,
    options: Namespace,
    sets: Mapping[str, datasets.Dataset],
    file: Path,
) -> None:
    """Write the language models of the new decoder: the present ones, or others if asked for."""
    model = options.model
    orders = _orders(options)
    if (model / LANGUAGE_MODELS_FILE).is_file():
        shutil.copyfile(model / LANGUAGE_MODELS_FILE, file)
    if run is not None and (options.lm_text or orders):
        shutil.copyfile(model / TOKENIZER_FILE, file.with_name(TOKENIZER_FILE))
        splits = run.prepare_splits()
        # The recipe leaves the sentences of these sets out of `lm_text`.
        run.results["splits"] = replace(splits, valid={**splits.valid, **sets})
        run.knobs["decoder_type"] = _decoder_type(bundle, options)
        run.prepare_labels()  # the recipe trains the language models, too
    elif options.lm_text is not None:
        lm_text = LmText.from_knob(_overrides(options, file.parent)["lm_text"])
        table = bundle.config.text_table
        messages = replace_language_models(
            file,
            lm_text,
            orders,
            texts=partial(read_sentences, lm_text.texts, table, table_knobs(options)),
            table=table,
            plain_words=_decoder_type(bundle, options) != "graph",
            tokenizer=bundle.tokenizer,
            held_out={name: read_column(rows, "text") for name, rows in sets.items()},
        )
        logger.info("\n".join(messages))
    elif orders:
        raise ConfigError(
            "The language models of a bundle need a text, because a bundle has no transcripts. "
            "Name a text or an ARPA file with --lm-text."
        )
    if not file.exists():
        save({}, file, metadata={"tokenizer": digest_of(bundle.tokenizer)})


def _decoder_type(bundle: TorchBundle, options: Namespace) -> str:
    """Return the type of the new decoder."""
    current = BeamDecoder.decoder_type if bundle.decoder is None else bundle.decoder.decoder_type
    return options.decoder or current


def _make_decoder(
    bundle: TorchBundle, run: Run | None, options: Namespace, language_models: Path
) -> LanguageModelDecoder:
    """Make the new decoder, without weights: like the current one, except for the options."""
    knobs = {} if run is None else run.knobs
    has_attention = bundle.model.network.seq_lin is not None and knobs.get("ctc_weight", 0) < 1
    if options.attention_rescoring and not has_attention:
        raise ConfigError(
            "`--attention-rescoring` needs a trained attention decoder, but this model has only "
            "CTC. Leave it out."
        )
    changes = {
        "decoder_type": options.decoder,
        "beam_size": options.beam_size,
        "attention_rescoring": options.attention_rescoring if has_attention else False,
    }
    current = knobs if bundle.decoder is None else bundle.decoder.plain()
    settings = {name: current[name] for name in changes if name in current}
    settings |= {name: value for name, value in changes.items() if value is not None}
    models = load_language_models(language_models, bundle.tokenizer)
    decoder = make_decoder(tokenizer=bundle.tokenizer, language_models=models, **settings)
    decoder.check()
    if not decoder.used_weights:
        raise ConfigError(
            "`sbkit tune` fits the weights of language models, but there is none. Pass "
            "--word-lm-order 3, and for a bundle --lm-text."
        )
    return decoder


# ---- output


def _replace(run: Path, new: Path) -> None:
    """Replace the decoder of a run, and keep the earlier files; if killed midway, it has none."""
    earlier = run / EARLIER_DECODER
    shutil.rmtree(earlier, ignore_errors=True)
    earlier.mkdir()
    for name in DECODER_FILES:
        if (run / name).exists():
            (run / name).rename(earlier / name)
    for name in reversed(DECODER_FILES):
        if (new / name).exists():
            write_bytes_atomically(run / name, (new / name).read_bytes())


def _copy_bundle(bundle: Path, new: Path, out: Path) -> None:
    """Copy a bundle with another decoder, without the formats that contain the earlier one."""
    with replacing_bundle(out) as temporary:
        for path in bundle.iterdir():
            if path.is_symlink() or any(inner.is_symlink() for inner in path.rglob("*")):
                logger.info(f"{path.name} is left out: a link may lead out of the bundle")
            elif path.is_file():
                shutil.copyfile(path, temporary / path.name)
            elif path.name in FORMATS_WITHOUT_DECODER:
                shutil.copytree(path, temporary / path.name)
            else:
                logger.info(f"{path.name} is left out, because it may contain the earlier decoder")
        shutil.copyfile(new / LANGUAGE_MODELS_FILE, temporary / LANGUAGE_MODELS_FILE)
        decoder, confidence = (read_json(new / name) for name in (DECODER_FILE, CONFIDENCE_FILE))
        card = temporary / CARD_FILE
        if card.is_file():
            card.write_text(_without_results(card.read_text(encoding="utf-8")), encoding="utf-8")
        record = make_provenance(
            weights=(temporary / WEIGHTS_FILE).read_bytes(),
            decoder=decoder,
            language_models=(temporary / LANGUAGE_MODELS_FILE).read_bytes(),
            confidence=confidence,
        )
        changes = {"decoder": decoder, "confidence": confidence, PROVENANCE: record}
        change_config(temporary, **changes)  # and the checksums


def _without_results(card: str) -> str:
    """Remove the results of the earlier decoder, and the formats with it, from a model card."""
    formats = "|".join(USES.keys() - {*FORMATS_WITHOUT_DECODER})
    card = re.sub(rf"^- ({formats}): .*\n", "", card, flags=re.M)
    card = re.sub(r"^## Formats\n\n+(?!- ).*\Z", "", card, flags=re.M | re.S)
    card = re.sub(r"^model-index:\n(?:[ -] .*\n)*", "", card, count=1, flags=re.M)
    results = "## Results\n\nNot measured with this decoder: `sbkit score FOLDER test.csv`\n\n"
    return re.sub(r"^## Results\n.*?(?=^## |\Z)", results, card, count=1, flags=re.M | re.S)

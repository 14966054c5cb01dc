"""The language models of a run's decoder, from the training transcripts, a text or an ARPA file."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError
from sbkit.data.splits import Splits, take_columns
from sbkit.decoding.confidence import CONFIDENCE_FILE
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.decoding.language_models import (
    TOKENS,
    WORDS,
    ensure_language_models,
    is_arpa,
    load_language_models,
    read_sentences,
)
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def prepare_language_models(knobs: Mapping[str, Any], splits: Splits, tokenizer: Tokenizer) -> None:
    """Train the language models of the run's decoder, unless the run folder has them.

    Weights and confidences that were fitted with other models are removed, so that a run that is
    killed before they are fitted again does not keep them.
    Raises SbkitError if `lm_text` is neither a text nor an ARPA file that fits, ConfigError if a
    decoding graph has no model of words.
    """
    if knobs.get("decoder_type") == "graph" and not knobs["word_lm_order"]:
        raise ConfigError(
            "`decoder_type: graph` needs a language model of words, but `word_lm_order` is 0. Pass "
            "--word_lm_order=3, or --decoder_type=beam."
        )
    lm_text = None if knobs.get("lm_text") is None else Path(knobs["lm_text"]).expanduser()
    arpa = lm_text if lm_text is not None and is_arpa(lm_text) else None
    text = lm_text if arpa is None else None
    if text is not None:
        next(read_sentences(text, knobs["language"]), None)  # raises an error if it is no text
    evaluated = splits.evaluated()
    fingerprints = [one for name, one in splits.fingerprints.items() if name not in evaluated]

    def texts() -> Iterator[str]:
        if text is None:
            yield from take_columns(splits.train, "text")["text"].to_pylist()
        else:
            yield from read_sentences(text, knobs["language"])

    file = Path(knobs["output_folder"]) / LANGUAGE_MODELS
    messages = ensure_language_models(
        file,
        source=" ".join(fingerprints) if lm_text is None else checksum(lm_text),
        orders={WORDS: knobs["word_lm_order"], TOKENS: knobs["token_lm_order"]},
        texts=texts,
        tokenizer=tokenizer,
        arpa=arpa,
    )
    for line in messages:
        logger.info(line)
    fitted_files = [file.with_name(name) for name in (DECODER_FILE, CONFIDENCE_FILE)]
    if messages and any(fitted.exists() for fitted in fitted_files):
        names = " and ".join(fitted.name for fitted in fitted_files)
        logger.info(f"{names} of earlier models are removed: training chooses, or `sbkit tune`")
        for fitted in fitted_files:
            fitted.unlink(missing_ok=True)
    words = load_language_models(file, tokenizer).words if messages else None
    if words is None:
        return
    for name, split in evaluated.items():
        spoken = " ".join(take_columns(split, "text")["text"].to_pylist()).split()
        share = sum(word not in words for word in spoken) / max(1, len(spoken))
        logger.info(f"{name}: the language model does not know {share:.1%} of the words")

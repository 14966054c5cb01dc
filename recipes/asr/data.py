"""The data of speech recognition: from splits to a tokenizer, language models and loaders."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.lengths import Subsampling
from sbkit.audio.segments import max_unsegmented_samples
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import write_bytes_atomically
from sbkit.base.messages import plural
from sbkit.data.batch import Loaders, TextCollate, make_loaders
from sbkit.data.facts import fingerprint_of
from sbkit.data.manifest import Excluded
from sbkit.data.sampler import fastest_percent
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import Splits, count_tokens, read_column, read_texts, sample_counts
from sbkit.data.work_units import short_digest
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank
from sbkit.lm.language_models import TOKENS, WORDS, load_language_models
from sbkit.lm.training import LmText, LmTextEncoder, ensure_language_models
from sbkit.models.encoder import find_subsampling
from sbkit.models.pretrained.folder import TOKENIZER, file_in
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE, DecoderTokenizer
from sbkit.text.normalization import describe_normalizer
from sbkit.text.tokenizer import TOKENIZER_FILE, Tokenizer, ensure_tokenizer
from sbkit.text.transcripts import parse_tag_names
from sbkit.train.initialize import PRETRAINED, init_folders, pretrained_folder, text_table_of

logger = logging.getLogger(__name__)


def prepare_tokenizer(settings: Mapping[str, Any], splits: Splits) -> Tokenizer:
    """Open or make the tokenizer in the run folder, then the language models of the decoder."""
    init_file = None
    if folders := init_folders(settings):
        file = folders[0] / TOKENIZER_FILE
        table = splits.text_table(settings)
        # A model that writes texts of another form, such as without capitals, has other tokens.
        if file.exists() and replace(text_table_of(file.parent), spaces=table.spaces) == table:
            init_file = file
    tokenizer = ensure_tokenizer(
        model_file=Path(settings["output_folder"]) / TOKENIZER_FILE,
        token_type=settings["token_type"],
        vocab_size=settings["vocab_size"],
        texts=lambda: chain.from_iterable(read_texts(splits.train)),
        tags=parse_tag_names(settings["keep_tags"]),
        init_file=init_file,
    )
    if "decoder_task" in settings:
        ensure_decoder_tokenizer(settings)
    if "word_lm_order" in settings:
        prepare_language_models(settings, splits, tokenizer)
    return tokenizer


def ensure_decoder_tokenizer(settings: Mapping[str, Any]) -> None:
    """Copy the tokens of the pretrained decoder to the run folder, unless they are there."""
    file = Path(settings["output_folder"]) / DECODER_TOKENIZER_FILE
    if file.exists():
        return
    source = None
    if name := settings[PRETRAINED]:
        source = file_in(pretrained_folder(settings), TOKENIZER)
    elif folders := init_folders(settings):
        source = folders[0] / DECODER_TOKENIZER_FILE
    if source is None:
        raise ConfigError(
            f"`pretrained` must be a Whisper with a {TOKENIZER}, but is {name or 'null'}.",
            keys=(PRETRAINED,),
        )
    write_bytes_atomically(file, DecoderTokenizer(file=source).content)


def make_asr_loaders(
    hparams: Mapping[str, Any], splits: Splits, labels: Tokenizer, placement: Placement
) -> Loaders:
    """Leave out training utterances that CTC cannot learn, and make the loaders."""
    subsampling = find_subsampling(hparams)
    num_listed = len(splits.train)
    if subsampling is not None:
        splits = leave_out_impossible(splits, labels, subsampling, hparams["speeds"])
    if num_listed and not len(splits.train):
        left_out = splits.excluded[-1]
        raise DataError(
            f"CTC needs a frame for a token, but all {plural(num_listed, 'transcript')} of train "
            f"need more than there are (`token_type` is {hparams['token_type']}; {left_out.id}: "
            f"{left_out.detail}). Use longer tokens (`token_type: bpe`), or keep more frames.",
            keys=("token_type",),
        )
    require_utterances_to_fit(splits, hparams)
    if rank() == 0:
        language = hparams["language"]
        logger.info(describe_normalizer(language, splits.text_table(hparams)))
    collate = TextCollate(labels, hparams["sample_rate"], hparams.get("decoder_tokenizer"))
    return make_loaders(splits, hparams, collate=collate, placement=placement)


def leave_out_impossible(
    splits: Splits, tokenizer: Tokenizer, subsampling: Subsampling, speeds: Sequence[float]
) -> Splits:
    """Leave out training utterances with too few frames for CTC at the highest speed."""
    transcripts = count_tokens(splits.train, tokenizer)
    fastest = fastest_percent(speeds)
    too_short = transcripts.too_short(subsampling, fastest)
    if not len(too_short):
        return splits
    frames = transcripts.frames(subsampling, fastest)
    needed = transcripts.frames_needed
    reason = "too short for its transcript"
    ids = read_column(splits.train.select(too_short), "id")
    left_out = [
        Excluded(id, reason, f"{frames[row]} frames, {needed[row]} needed", "train")
        for row, id in zip(too_short, ids, strict=True)
    ]
    train = splits.train.select(np.delete(np.arange(len(splits.train)), too_short))
    return replace(splits, train=train, excluded=[*splits.excluded, *left_out])


def require_utterances_to_fit(splits: Splits, hparams: Mapping[str, Any]) -> None:
    """Raise DataError if a decoder is to be fitted, but all validated recordings are long."""
    decoder = hparams.get("decoder")
    samples = [*chain.from_iterable(map(sample_counts, splits.valid.values()))]
    if (
        isinstance(decoder, BeamDecoder)
        and decoder.needs_tuning
        and decoder.used_weights
        and min(samples, default=0)
        > max_unsegmented_samples(hparams["eval_batch_seconds"], hparams["sample_rate"])
    ):
        raise DataError(
            f"The decoder is fitted to the utterances of {' and '.join(splits.valid)}, but all "
            f"{plural(len(samples), 'recording')} there are longer than `eval_batch_seconds`. Cut "
            "them by `sbkit segment`, or set `word_lm_order: 0` and `token_lm_order: 0`.",
            keys=("eval_batch_seconds",),
        )


def prepare_language_models(
    settings: Mapping[str, Any], splits: Splits, tokenizer: Tokenizer
) -> None:
    """Train the language models of the run's decoder, unless the run folder has them.

    Sentences of validation and test sets are left out of `lm_text`, but not of the training
    transcripts: the encoder hears those, too.
    """
    lm_text = LmText.from_setting(settings["lm_text"])
    table = splits.text_table(settings)
    for file in lm_text.files:
        next(
            read_sentences([file], table, settings), None
        )  # raises an error for other files than texts
    evaluated = splits.evaluated()
    held_out = {name: read_column(split, "text") for name, split in evaluated.items()}
    if lm_text.files:
        read = partial(read_sentences, lm_text.files, table, settings)
        options = [settings[key] for key in ("columns", "encoding", "tier")]
        source = f"{lm_text.source} {short_digest(options)}"
        lm_text = replace(lm_text, source=source, sentences=read, held_out=held_out)
    else:
        lm_text = replace(
            lm_text,
            source=f"{lm_text.source} {fingerprint_of(splits.train)}",
            sentences=lambda: chain.from_iterable(read_texts(splits.train)),
        )
    file = Path(settings["output_folder"]) / LANGUAGE_MODELS_FILE
    messages = ensure_language_models(
        file,
        lm_text,
        {WORDS: settings["word_lm_order"], TOKENS: settings["token_lm_order"]},
        LmTextEncoder(tokenizer=tokenizer, table=table),
    )
    if not messages:  # the run folder has the models
        return
    for line in messages:
        logger.info(line)
    word_lm = load_language_models(file, tokenizer).words
    if word_lm is not None:
        for name, sentences in held_out.items():
            spoken = " ".join(sentences).split()
            share = sum(word not in word_lm for word in spoken) / max(1, len(spoken))
            logger.info(f"{name}: the language model does not know {share:.1%} of the words")

"""The tokens of a model as a tokenizer of transformers that decodes CTC.

It is a `ParakeetTokenizer`, which joins tokens that repeat, leaves out the blank, and decodes what
is left by `tokenizer.json`: as sbkit does, to the last space. A `Wav2Vec2CTCTokenizer` would write
two spaces where a word ends twice, and special tokens by their names. But it alone knows the times
of words, so of characters there is its `vocab.json`, too.
"""

from pathlib import Path
from typing import Any

import sentencepiece

from sbkit.base.files import to_json
from sbkit.base.process import require_package
from sbkit.text.tokenizer import SPACE, Tokenizer

TOKENIZER, SETTINGS, CHARACTERS = "tokenizer.json", "tokenizer_config.json", "vocab.json"
DELIMITER = "|"  # of words, in CHARACTERS


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> tuple[str, ...]:
    """Write the files of the class that decodes as this tokenizer does; return their names."""
    pieces, vocabulary = tokenizer.pieces(), tokenizer.vocabulary
    settings = {
        "tokenizer_class": "ParakeetTokenizer",
        "pad_token": pieces[vocabulary.blank],
        "unk_token": pieces[vocabulary.unk],
        "bos_token": pieces[vocabulary.bos],
        "eos_token": pieces[vocabulary.eos],
        "clean_up_tokenization_spaces": False,
    }
    files = {SETTINGS: settings}
    is_of_characters = all(len(text) <= 1 for text in tokenizer.texts)
    if is_of_characters and DELIMITER not in pieces:
        names = [DELIMITER if piece == SPACE else piece for piece in pieces]
        files[CHARACTERS] = {piece: label for label, piece in enumerate(names)}
    for name, content in files.items():
        (folder / name).write_text(to_json(content, indent=1) + "\n", encoding="utf-8")
    made = _made(tokenizer, prepend="never" if is_of_characters else "always")
    made.save(str(folder / TOKENIZER))
    return TOKENIZER, *files


def _made(tokenizer: Tokenizer, *, prepend: str) -> Any:
    """Return a tokenizer of the library `tokenizers` that encodes and decodes the same pieces."""
    tokenizers: Any = require_package("tokenizers", extra="export")
    decoders = tokenizers.decoders
    made = tokenizers.Tokenizer(_model(tokenizer, tokenizers.models))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme=prepend)
    special = [tokenizer.piece(label) for label in tokenizer.vocabulary.special]
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace(piece, "") for piece in special),
            decoders.Replace(SPACE, " "),
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(" +"), " "),
            decoders.Replace(tokenizers.Regex("^ | $"), ""),
        ]
    )
    return made


def _model(tokenizer: Tokenizer, models: Any) -> Any:
    """Return the pieces with their scores, or where these are ranks, with the merges they mean."""
    pieces = tokenizer.pieces()
    read = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    scores = [read.get_score(label) for label in range(len(pieces))]
    unk = tokenizer.vocabulary.unk
    if not all(score.is_integer() for score in scores):
        return models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unk)
    ids = {piece: label for label, piece in enumerate(pieces)}
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(filter(None, tokenizer.texts), key=lambda text: -scores[ids[text]])
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return models.BPE(ids, merges, unk_token=pieces[unk], fuse_unk=True)

"""The tokens of a model as a tokenizer of transformers that decodes CTC.

Characters become a `Wav2Vec2CTCTokenizer`, which knows the times of words, too. Pieces become a
`ParakeetTokenizer`: it joins tokens that repeat, leaves out the blank, and decodes what is left by
`tokenizer.json`, which leaves out the other special tokens as sbkit does.
"""

from pathlib import Path
from typing import Any

import sentencepiece

from sbkit.base.files import to_json
from sbkit.base.process import require_package
from sbkit.text.tokenizer import SPACE, Tokenizer

SETTINGS = "tokenizer_config.json"
DELIMITER = "|"  # of words; transformers 5.23 reads no other from SETTINGS


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> tuple[str, ...]:
    """Write the files of the class that decodes as this tokenizer does; return their names."""
    pieces, vocabulary = tokenizer.pieces(), tokenizer.vocabulary
    settings = {
        "pad_token": pieces[vocabulary.blank],
        "unk_token": pieces[vocabulary.unk],
        "bos_token": pieces[vocabulary.bos],
        "eos_token": pieces[vocabulary.eos],
        "clean_up_tokenization_spaces": False,
    }
    if all(len(text) <= 1 for text in tokenizer.texts) and DELIMITER not in pieces:
        name = "vocab.json"
        names = [DELIMITER if piece == SPACE else piece for piece in pieces]
        ids = {piece: label for label, piece in enumerate(names)}
        (folder / name).write_text(to_json(ids, indent=1) + "\n", encoding="utf-8")
        settings |= {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": DELIMITER}
    else:
        name = "tokenizer.json"
        _of_pieces(tokenizer).save(str(folder / name))
        settings |= {"tokenizer_class": "ParakeetTokenizer"}
    (folder / SETTINGS).write_text(to_json(settings, indent=1) + "\n", encoding="utf-8")
    return name, SETTINGS


def _of_pieces(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of the library `tokenizers` that encodes and decodes the same pieces."""
    tokenizers: Any = require_package("tokenizers", extra="export")
    decoders = tokenizers.decoders
    made = tokenizers.Tokenizer(_model(tokenizer, tokenizers.models))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
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

"""Text to token ids and back with sentencepiece: characters, BPE or unigram tokens."""

import io
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.text.vocabulary import Vocabulary

TOKEN_TYPES = ("char", "bpe", "unigram")
MAX_MODEL_BYTES = 1 << 25  # 250,000 tokens take 4 MB
SPACE = "▁"  # as sentencepiece writes it
MAX_SENTENCE_BYTES = 1 << 20  # sentencepiece silently drops longer ones; its default is 4192


class Tokenizer:
    """Encode and decode text with a trained sentencepiece model.

    content: the bytes of the file, if the caller has read them.
    """

    def __init__(self, *, model_file: str | Path, content: bytes | None = None) -> None:
        self.model_file = Path(model_file)
        if content is None:
            content = read_regular(
                self.model_file,
                max_bytes=MAX_MODEL_BYTES,
                subject="A sentencepiece model",
                follow_links=True,
            )
        self.content = content
        self._pieces = _load(self.model_file, self.content)
        self.vocabulary = Vocabulary(
            size=self._pieces.get_piece_size(),
            blank=self._pieces.pad_id(),
            unk=self._pieces.unk_id(),
            bos=self._pieces.bos_id(),
            eos=self._pieces.eos_id(),
        )

    @property
    def vocab_size(self) -> int:
        """Count the tokens, including the four special ones."""
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        """Turn normalized text into ids; a character that training has not seen becomes ``unk``."""
        return list(self._pieces.encode(text, out_type=int))

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text, without the special tokens."""
        return " ".join(self.words(ids))

    def words(self, ids: Sequence[int]) -> list[str]:
        """Return the words that ids spell, however the words are split into tokens."""
        return "".join(map(self.texts.__getitem__, ids)).replace(SPACE, " ").split()

    def letters(self, text: str) -> str:
        """Return the characters that a model writes for a text, or "" if it cannot spell it.

        One `▁` separates two words; none begins or ends the text.
        """
        ids = self.encode(text)
        return "" if {*self.vocabulary.special} & {*ids} else SPACE.join(self.words(ids))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Return the text that each token adds; a special token adds nothing."""
        special, pieces = self.vocabulary.special, self.pieces()
        return tuple("" if label in special else text for label, text in enumerate(pieces))

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """Return the ids of tokens without sound: the blank, and the space if it is a token."""
        spaces = (label for label, text in enumerate(self.pieces()) if text == SPACE)
        return self.vocabulary.blank, *spaces

    def pieces(self) -> list[str]:
        """List the tokens in the order of their ids."""
        return [self.piece(label) for label in range(self.vocab_size)]

    def piece(self, label: int) -> str:
        """Return a token as it is written."""
        return str(self._pieces.id_to_piece(label))


def ensure_tokenizer(
    *, model_file: Path, kind: str, vocab_size: int | None, texts: Callable[[], Iterable[str]]
) -> Tokenizer:
    """Open the tokenizer of the run folder, or train one and write it there."""
    if kind not in TOKEN_TYPES:
        raise ConfigError(
            f"`token_type` must be one of {', '.join(TOKEN_TYPES)}, but is {kind!r}. Choose one."
        )
    if not model_file.exists():
        model_file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(model_file, _train(kind, vocab_size, texts()))
    return Tokenizer(model_file=model_file)


def _size(kind: str, vocab_size: int | None, *, characters: int) -> int:
    """Return the number of tokens to train; raise ConfigError if `vocab_size` does not fit."""
    size = characters + 4  # special tokens
    if kind == "char" and vocab_size not in (None, size):
        raise ConfigError(
            f"`vocab_size` must be null for `token_type: char`, but is {vocab_size}. The training "
            f"text has {size} tokens, including four special ones. Leave it null."
        )
    if kind != "char" and vocab_size is None:
        raise ConfigError(
            f"`vocab_size` must be a number for `token_type: {kind}`, but is null. "
            "Try --vocab_size=500."
        )
    return vocab_size or size


def _train(kind: str, vocab_size: int | None, texts: Iterable[str]) -> bytes:
    """Train on normalized texts, in one thread, so that the same text gives the same model."""
    lines = [text for text in texts if text]
    characters = {character for line in lines for character in line}
    if not characters:
        raise ConfigError(
            "A tokenizer needs training text, but there is none. Check the `sentence` column of "
            "train.tsv and --language."
        )
    vocab_size = _size(kind, vocab_size, characters=len(characters))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            # Only tokens longer than a character need a space before the first word.
            add_dummy_prefix=kind != "char",
            max_sentence_length=MAX_SENTENCE_BYTES,
            pad_id=0,
            pad_piece="<blank>",
            unk_id=1,
            bos_id=2,
            eos_id=3,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise ConfigError(
            f"`vocab_size` must suit the training text, but a {kind} tokenizer of {vocab_size} "
            f"tokens could not be trained: {reason}. Choose another size."
        ) from error
    return model.getvalue()


def _load(model_file: Path, content: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        pieces = sentencepiece.SentencePieceProcessor()
        pieces.load_from_serialized_proto(content)
        for label in range(pieces.get_piece_size()):
            pieces.id_to_piece(label)  # a token that is not UTF-8 would raise while decoding
        return pieces
    except (RuntimeError, ValueError) as error:
        raise BundleError(
            f"The tokenizer must be a sentencepiece model, but {model_file} cannot be read "
            f"({error}). Remove it to train it again, or restore it."
        ) from error

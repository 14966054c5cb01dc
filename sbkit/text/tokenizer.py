"""Convert text to token ids and back with sentencepiece: characters, BPE or unigram tokens."""

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import sentencepiece

from sbkit.base.errors import BundleError, ConfigError, concerning
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.text.normalization import attach_marks, is_mark
from sbkit.text.transcripts import TAG_TOKEN, remove_tags
from sbkit.text.vocabulary import Vocabulary

TOKENIZER_VERSION = 1  # raised with each change of tokenizers, or of the ids and counts of tokens
TOKENIZER_FILE = "tokenizer.model"  # in a run folder or a bundle
TOKEN_TYPES = ("char", "bpe", "unigram")
MAX_TOKENIZER_BYTES = 1 << 25  # 250,000 tokens take 4 MB
SPACE = "▁"  # as sentencepiece writes it
MAX_SENTENCE_BYTES = 1 << 20  # sentencepiece silently drops longer ones; its default is 4192
# About 1.2 million sentences, on which training unigram tokens takes 1.7 GB and a minute.
MAX_TRAINING_BYTES = 60_000_000

logger = logging.getLogger(__name__)


class Tokenizer:
    """Encode and decode text with a sentencepiece model; `content` is its file, if it was read."""

    def __init__(self, *, model_file: str | Path, content: bytes | None = None) -> None:
        self.model_file = Path(model_file)
        if content is None:
            content = read_regular(
                self.model_file,
                max_bytes=MAX_TOKENIZER_BYTES,
                subject="A sentencepiece model",
                follow_links=True,
            )
        self.content = content
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(content)
            for id in range(self._processor.get_piece_size()):
                self.piece(id)  # a token that is not UTF-8 would raise while decoding
        except (RuntimeError, ValueError) as error:
            raise BundleError(
                f"The tokenizer must be a sentencepiece model, but {model_file} cannot be read "
                f"({error}). Remove it to train it again."
            ) from error
        self.vocabulary = Vocabulary(
            size=self._processor.get_piece_size(),
            blank=self._processor.pad_id(),
            unk=self._processor.unk_id(),
            bos=self._processor.bos_id(),
            eos=self._processor.eos_id(),
        )

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        """Convert normalized text to ids; characters unseen in training become ``unk``."""
        return list(self._processor.encode(text, out_type=int))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words(ids))

    def words(self, ids: Sequence[int]) -> list[str]:
        """Return the words that ids spell, with marks of punctuation attached to them."""
        words = "".join(map(self.texts.__getitem__, ids)).replace(SPACE, " ").split()
        return attach_marks(words, "".join(self.marks)) if self.marks else words

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """The names of the tags, such as ``[noise]``, that are tokens."""
        return tuple(match[1] for piece in self.pieces() if (match := TAG_TOKEN.fullmatch(piece)))

    @cached_property
    def token_type(self) -> str:
        """One of `TOKEN_TYPES`. BPE tokens are scored by rank, all others by log-probability."""
        ids = [id for id, text in enumerate(self.texts) if text and not TAG_TOKEN.fullmatch(text)]
        if all(len(self.texts[id]) == 1 for id in ids):
            return "char"
        scores = (self._processor.get_score(id) for id in ids)
        return "bpe" if all(map(float.is_integer, scores)) else "unigram"

    def can_spell(self, texts: Iterable[str]) -> bool:
        return not any(self.vocabulary.unk in self.encode(text) for text in texts)

    def spelling(self, text: str) -> str:
        """Return how tokens spell a text, with `▁` between words; "" if they cannot."""
        ids = self.encode(text)
        return "" if {*self.vocabulary.special} & {*ids} else SPACE.join(self.words(ids))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The text that each token adds; a special token adds none."""
        special = self.vocabulary.special
        return tuple("" if id in special else piece for id, piece in enumerate(self.pieces()))

    @cached_property
    def silent_ids(self) -> tuple[int, ...]:
        """The ids of tokens without sound: the blank, and the space if it is a token."""
        spaces = (id for id, piece in enumerate(self.pieces()) if piece == SPACE)
        return self.vocabulary.blank, *spaces

    @cached_property
    def marks(self) -> frozenset[str]:
        """The marks of punctuation that the tokens can spell; tags do not count."""
        texts = (text for text in self.texts if not TAG_TOKEN.fullmatch(text))
        return frozenset(filter(is_mark, "".join(texts)))

    def pieces(self) -> list[str]:
        return [self.piece(id) for id in range(self.vocab_size)]

    def piece(self, id: int) -> str:
        return str(self._processor.id_to_piece(id))


def ensure_tokenizer(
    *,
    model_file: Path,
    token_type: str,
    vocab_size: int | None,
    texts: Callable[[], Iterable[str]],
    tags: Sequence[str] = (),
    init_file: Path | None = None,
) -> Tokenizer:
    """Open the tokenizer in the run folder; if there is none, write one there.

    token_type: one of `TOKEN_TYPES`.
    tags: names of tags in the texts; each becomes a token.
    init_file: the tokenizer of the model that training starts from. It is copied if it has the
        declared type, size and tags, and can spell all texts.
    """
    if not model_file.exists():
        content = None
        if init_file is not None:
            tokenizer = Tokenizer(model_file=init_file)
            has_type = (tokenizer.token_type, {*tokenizer.tags}) == (token_type, {*tags})
            has_size = vocab_size in (None, tokenizer.vocab_size)
            if has_type and has_size and tokenizer.can_spell(texts()):
                content = tokenizer.content
        model_file.parent.mkdir(parents=True, exist_ok=True)
        content = content or _train(token_type, vocab_size, texts(), tags)
        write_bytes_atomically(model_file, content)
    return Tokenizer(model_file=model_file)


@concerning("vocab_size")
def _train(
    token_type: str, vocab_size: int | None, texts: Iterable[str], tags: Sequence[str]
) -> bytes:
    """Train on normalized texts, in one thread, so that equal texts give equal models.

    If the texts exceed MAX_TRAINING_BYTES, sentences are drawn; tokens can spell the others, too.
    """
    characters = set[str]()
    missing_tags = list(tags)

    def note_characters() -> Iterator[str]:
        for line in filter(None, texts):
            characters.update(remove_tags(line, tags))
            missing_tags[:] = [tag for tag in missing_tags if f"[{tag}]" not in line]
            yield line

    lines, num_lines = draw_sentences(note_characters(), MAX_TRAINING_BYTES)
    if missing_tags:
        raise ConfigError(
            f"`keep_tags` names {missing_tags[0]}, which no transcript of train has.",
            keys=("keep_tags",),
        )
    if not characters:
        raise ConfigError(
            "A tokenizer needs training text, but all transcripts are empty.", keys=("data_folder",)
        )
    char_size = len(characters) + len(tags) + 4  # special tokens
    if token_type == "char" and vocab_size not in (None, char_size):
        raise ConfigError(
            f"`vocab_size` must be null for `token_type: char`, but is {vocab_size}. The training "
            f"text has {char_size} tokens."
        )
    if token_type != "char" and vocab_size is None:
        raise ConfigError(
            f"`token_type: {token_type}` needs a `vocab_size` such as 500, but it is null."
        )
    vocab_size = vocab_size or char_size
    options: dict[str, Any] = {}
    if len(lines) < num_lines:
        logger.info(f"tokenizer: trained on {len(lines):,} drawn sentences of {num_lines:,}")
        options["required_chars"] = "".join(sorted(characters - {" "}))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=token_type,
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            # Only tokens longer than a character need a space before the first word.
            add_dummy_prefix=token_type != "char",
            max_sentence_length=MAX_SENTENCE_BYTES,
            pad_id=0,
            pad_piece="<blank>",
            unk_id=1,
            bos_id=2,
            eos_id=3,
            user_defined_symbols=[f"[{tag}]" for tag in tags],
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        sentences = str(error).rsplit("] ", 1)[-1].strip(" .").split(". ")
        reason = ". ".join(s for s in sentences if "--" not in s)  # users cannot set these options
        raise ConfigError(
            f"`vocab_size` must suit the training text, but a {token_type} tokenizer of "
            f"{vocab_size} tokens could not be trained: {reason}."
        ) from error
    return model.getvalue()


def draw_sentences(sentences: Iterable[str], max_bytes: int) -> tuple[list[str], int]:
    """Return all sentences, or a random ``max_bytes`` of them in UTF-8, and how many there were.

    They stay in order, and are the same each time. Only the drawn ones are kept in memory.

    >>> draw_sentences(["press one", "press two", "hold"], 15)
    (['press two', 'hold'], 3)
    """
    draw_number = Random(0).random
    heap: list[tuple[float, int, str]] = []  # with the highest random number first
    num_bytes = count = 0
    for sentence in sentences:
        heappush(heap, (-draw_number(), count, sentence))
        num_bytes += len(sentence.encode())
        while num_bytes > max_bytes and len(heap) > 1:
            num_bytes -= len(heappop(heap)[2].encode())
        count += 1
    return [sentence for _, _, sentence in sorted(heap, key=itemgetter(1))], count

"""Hotwords as a user names them: a file or a list, normalized, and what of it can be spelled."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.regular import read_regular
from sbkit.decoding.hotwords import Spellable
from sbkit.text.tokenizer import Tokenizer

LARGEST_LIST = 1 << 24  # bytes
LONGEST_PHRASE = 1000  # characters


def read_hotwords(named: str) -> Iterator[str]:
    """Yield the phrases of a file, one on each line, or of a list with commas.

    Raises:
        SbkitError: the file cannot be read, or a phrase is none.
    """
    for phrase in _read(named):
        if len(phrase) > LONGEST_PHRASE:
            raise SbkitError(
                f"A hotword must have at most {LONGEST_PHRASE} characters, but one has "
                f"{len(phrase)}: {phrase[:40]}... Write each on a line, or commas between them."
            )
        yield phrase


def _read(named: str) -> list[str]:
    if not _is_file(named):
        return named.split(",")
    file = Path(os.path.realpath(named))
    try:
        text = read_regular(file, largest=LARGEST_LIST, what="`--hotwords`").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SbkitError(
            f"`--hotwords` must be a UTF-8 text with a phrase on each line, or phrases with commas "
            f"between them, but {file} cannot be read ({error}). Save it as UTF-8."
        ) from error
    return text.split("\n")


def _is_file(named: str) -> bool:
    try:
        return Path(named).is_file()
    except OSError:  # a list that is too long for a name
        return False


def normalize_hotwords(
    texts: Iterable[str], *, normalize: Callable[[str], str], tokenizer: Tokenizer
) -> Spellable:
    """Normalize phrases as transcripts are; what the tokens cannot spell is refused as written."""
    phrases, refused = dict[str, None](), dict[str, None]()
    for text in texts:
        phrase = normalize(text)
        if phrase and tokenizer.vocabulary.unk not in tokenizer.encode(phrase):
            phrases[phrase] = None
        elif text.strip():
            refused[text.strip()] = None
    return Spellable(phrases=tuple(phrases), refused=tuple(refused))

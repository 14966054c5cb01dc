"""Texts with a sentence on each line."""

from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.regular import read_lines
from sbkit.text.normalize import normalize


def read_sentences(file: Path, language: str) -> Iterator[str]:
    """Yield the normalized sentences of a text.

    Raises:
        SbkitError: it cannot be read, is not UTF-8, or holds no sentence.
    """
    count = 0
    decoder = getincrementaldecoder("utf-8-sig")()
    try:
        for line in read_lines(file, what="The text of a language model"):
            if text := normalize(decoder.decode(line), language):
                count += 1
                yield text
    except UnicodeDecodeError as error:
        raise _refusal(file, f"cannot be read ({error})") from error
    if not count:
        raise _refusal(file, "has none")


def _refusal(file: Path, why: str) -> SbkitError:
    return SbkitError(
        f"A language model must be made of UTF-8 text, a sentence on each line, but {file} {why}. "
        "Name another text."
    )

"""Hotwords as a user names them: a file or a list, normalized, and what of it can be spelled."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.decoding.hotwords import Spellable
from sbkit.text.tokenizer import Tokenizer

LARGEST_LIST = 1 << 24  # characters
SUFFIXES = (".txt", ".tsv", ".csv", ".lst", ".list")  # of no phrase


def read_hotwords(named: str) -> Iterator[str]:
    """Yield the phrases of a file, one on each line, or of a list with commas.

    Raises:
        SbkitError: the file cannot be read, or is not there.
    """
    file = Path(named)
    if not _is_file(file):
        if file.suffix in SUFFIXES and "," not in named:
            raise SbkitError(
                f"`--hotwords` must be a file that is there, or phrases with commas between them, "
                f"but there is no {printable(named)}. Correct its path."
            )
        yield from named.split(",")
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError(
            f"`--hotwords` must be a UTF-8 text with a phrase on each line, or phrases with commas "
            f"between them, but {file} cannot be read ({error}). Save it as UTF-8."
        ) from error
    yield from text[:LARGEST_LIST].split("\n")


def _is_file(file: Path) -> bool:
    """Return whether a file is there; a list may be too long for the name of one."""
    try:
        return file.is_file()
    except OSError:
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

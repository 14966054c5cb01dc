"""What a voice reads: the characters of a text as it is spoken, or the phonemes of espeak-ng."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache

from sbkit.base.errors import SbkitError
from sbkit.text.languages import primary
from sbkit.text.spoken import MARKS, spell_out

KINDS = ("characters", "phonemes")
PAUSES = frozenset(f"{MARKS} ")  # symbols that may be long
ESPEAK = "espeak-ng"
VOICES = {"en": "en-us", "pt": "pt-br", "zh": "cmn", "no": "nb"}  # where it is not the tag's own

# A letter with its marks of stress and length.
_SYMBOL = re.compile(r"[ˈˌ]?[^ˈˌ][ːˑʲ\u0300-\u036f]*")
_CLAUSE = re.compile(f"([{re.escape(MARKS)}])")


def to_symbols(text: str) -> list[str]:
    """Split a text as it is spoken, or phonemes, into symbols."""
    return _SYMBOL.findall(text)


def read_texts(texts: Sequence[str], language: str, kind: str) -> list[str]:
    """Write texts as they are spoken, in characters or in phonemes.

    Raises:
        SbkitError: there is no espeak-ng, or it does not know the language.
    """
    return in_symbols([spell_out(text, language).text for text in texts], language, kind)


def in_symbols(texts: Sequence[str], language: str, kind: str) -> list[str]:
    """Write texts from `spell_out` in characters, as they are, or in phonemes.

    The clauses between marks go through one call of espeak-ng. Raises SbkitError as `read_texts`.
    """
    if kind == KINDS[0]:
        return [*texts]
    parts = [_CLAUSE.split(text) for text in texts]
    clauses = dict.fromkeys(each.strip() for part in parts for each in part[::2] if each.strip())
    said = _espeak(tuple(clauses), language)
    if len(said) != len(clauses):  # it breaks what is long
        said = [" ".join(_espeak((each,), language)) for each in clauses]
    of = dict(zip(clauses, said, strict=True)) | {"": ""}
    return [
        "".join(
            each if place % 2 else f"{' ' * (place > 0)}{of[each.strip()]}".rstrip()
            for place, each in enumerate(part)
        )
        for part in parts
    ]


@lru_cache(64)  # of what clients send
def _espeak(clauses: tuple[str, ...], language: str) -> list[str]:
    if shutil.which(ESPEAK) is None:
        raise SbkitError(
            f"`symbols: phonemes` must have {ESPEAK}, but it is not installed. Install it (apt-get "
            "install espeak-ng), or write `symbols: characters`."
        )
    code = primary(language)
    voice = language.lower() if language.lower() != code else VOICES.get(code, code)
    command = [ESPEAK, "-q", "--ipa", "-v", voice, "--stdin"]
    done = subprocess.run(command, input="\n\n".join(clauses), capture_output=True, text=True)
    if done.returncode:
        raise SbkitError(
            f"`language` must be one that {ESPEAK} can read, but it has no voice {voice}. Write "
            "`symbols: characters`."
        )
    # Words of another language come between (en) and (fr).
    lines = (re.sub(r"\(\w[\w-]*\)", "", line) for line in done.stdout.split("\n"))
    return [" ".join(line.split()) for line in lines if line.strip()]

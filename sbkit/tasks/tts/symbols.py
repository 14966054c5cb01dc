"""Input symbols of a TTS model: characters of spelled-out text, or phonemes of espeak-ng."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache

from sbkit.base.errors import ConfigError, concerning
from sbkit.text.languages import primary_language
from sbkit.text.verbalize import MARKS, spell_out

SYMBOLS_VERSION = 3  # raised with each change of symbols
SYMBOL_TYPES = ("characters", "phonemes")
PAUSE_SYMBOLS = frozenset(f"{MARKS} ")  # may last long
PADDING = -1  # an id that no symbol has; it pads the texts of a batch to one length
ESPEAK = "espeak-ng"
# Other voices are named after their languages.
ESPEAK_VOICES = {"en": "en-us", "pt": "pt-br", "zh": "cmn", "no": "nb"}

# A letter with its marks of stress and length.
_SYMBOL = re.compile(r"[ˈˌ]?[^ˈˌ][ːˑʲ\u0300-\u036f]*")
_CLAUSE_END = re.compile(f"([{re.escape(MARKS)}])")


def to_symbols(text: str) -> list[str]:
    """Split spelled-out text or phonemes into symbols.

    >>> to_symbols("a, b")
    ['a', ',', ' ', 'b']
    """
    return _SYMBOL.findall(text)


def read_texts(texts: Sequence[str], language: str, symbol_type: str) -> list[str]:
    """Spell texts out, and write them in characters or phonemes.

    Raises ConfigError if espeak-ng is not installed, or has no voice for the language.
    """
    spelled_out = [spell_out(text, language).text for text in texts]
    return transcribe_phonemes(spelled_out, language, symbol_type)


def symbols_version(symbol_type: str) -> str:
    """Return the version of the code that writes symbols, and that of espeak-ng if it is used."""
    if symbol_type == SYMBOL_TYPES[0] or shutil.which(ESPEAK) is None:
        return str(SYMBOLS_VERSION)
    command = [ESPEAK, "--version"]
    espeak = subprocess.run(command, capture_output=True, encoding="utf-8").stdout
    return f"{SYMBOLS_VERSION} {espeak}"


def transcribe_phonemes(texts: Sequence[str], language: str, symbol_type: str) -> list[str]:
    """Convert texts from `spell_out` to phonemes, or return them unchanged as characters.

    All clauses between marks go through one call of espeak-ng. Raises ConfigError as `read_texts`.
    """
    if symbol_type == SYMBOL_TYPES[0]:
        return [*texts]
    split_texts = [_CLAUSE_END.split(text) for text in texts]  # clauses at even indices, then marks
    clauses = dict.fromkeys(
        clause.strip() for parts in split_texts for clause in parts[::2] if clause.strip()
    )
    phonemes = _espeak(tuple(clauses), language)
    if len(phonemes) != len(clauses):  # espeak-ng splits long clauses
        phonemes = [" ".join(_espeak((clause,), language)) for clause in clauses]
    phonemes_of = dict(zip(clauses, phonemes, strict=True)) | {"": ""}
    for parts in split_texts:
        parts[::2] = [f" {phonemes_of[clause.strip()]}".rstrip() for clause in parts[::2]]
    return ["".join(parts).removeprefix(" ") for parts in split_texts]


@concerning("symbols")
@lru_cache(64)  # clients of a server send the same texts again
def _espeak(clauses: tuple[str, ...], language: str) -> list[str]:
    if shutil.which(ESPEAK) is None:
        raise ConfigError(
            f"{ESPEAK} is not installed: apt-get install espeak-ng, or write `symbols: characters`."
        )
    code = primary_language(language)
    tag = language.lower().replace("_", "-")
    voice = tag if "-" in tag else ESPEAK_VOICES.get(code, code)
    command = [ESPEAK, "-q", "--ipa", "-v", voice, "--stdin"]
    process = subprocess.run(
        command, input="\n\n".join(clauses), capture_output=True, encoding="utf-8"
    )
    if process.returncode:
        raise ConfigError(f"{ESPEAK} has no voice {voice}. Write `symbols: characters`.")
    # Words of another language stand between marks such as (en) and (fr).
    lines = (re.sub(r"\(\w[\w-]*\)", "", line) for line in process.stdout.split("\n"))
    return [" ".join(line.split()) for line in lines if line.strip()]

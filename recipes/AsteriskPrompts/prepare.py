"""Fetch the telephone prompts of Debian's Asterisk packages as a Common Voice release folder.

two packages -> key: text + g722 at 16 kHz -> clips/*.flac + train, dev, test, validated.tsv
"""

import argparse
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import G722
import numpy as np
import soundfile

from recipes.AsteriskPrompts.numbers import spell_digits
from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.data.cache import default_cache
from sbkit.data.debian_release import (
    PASS_A_RELEASE,
    Row,
    ensure_release,
    only,
    print_release,
    sentence_id,
    write_tsvs,
)
from sbkit.text.normalization import normalize

LANGUAGES = ("en", "es", "fr", "it", "ru")
G722_BIT_RATE = 64_000  # bits per second

# Keys that sound no word, though some translators describe them without brackets.
TONES = frozenset(
    {"ascending-2tone", "descending-2tone", "beep", "beeperr", "confbridge-join"}
    | {"confbridge-leave", "tt-monkeys"}
)
_BRACKET = re.compile(r"[\[\](){}<>]")  # "[sound of monkeys screaming]", "IAX (does not say 2)"
_LOST_LETTER = re.compile(r"\?\s+[a-z]")  # "sar? esattamente": an accented letter of the Italian


@dataclass(frozen=True)
class Prompt:
    """One line of the prompts' text: the key names the sound file."""

    key: str
    text: str


def prepare_prompts(*, language: str = "en", cache_folder: str | Path) -> Path:
    """Return the release folder of a language, fetching and writing it where it is not there yet.

    Raises:
        SbkitError: there are no prompts in the language, or apt-get cannot fetch them.
    """
    if language not in LANGUAGES:
        raise SbkitError(
            f"language must be one of {', '.join(LANGUAGES)} for the default corpus, but is "
            f"{language!r}. {PASS_A_RELEASE}"
        )
    name = f"asterisk-core-sounds-{language}"
    return ensure_release(
        Path(cache_folder) / "asterisk-prompts",
        language,
        (name, f"{name}-g722"),
        lambda root, release: write_release(root, language, release),
    )


def write_release(root: Path, language: str, release: Path) -> None:
    """Write the prompts of unpacked packages as clips and TSVs into an empty folder."""
    sounds = only(root, "usr/share/asterisk/sounds/*")
    text = only(root, f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-*.txt.gz")
    (release / "clips").mkdir()
    rows: list[Row] = []
    for prompt in read_prompts(gzip.decompress(text.read_bytes())):
        source = sounds / f"{prompt.key}.g722"
        if _is_speech(prompt) and source.is_file():
            row = _describe(prompt, language, speaker=sounds.name)
            if normalize(row.sentence, language):
                soundfile.write(release / "clips" / row.path, decode_g722(source), SAMPLE_RATE)
                rows.append(row)
    write_tsvs(release, rows)


def read_prompts(content: bytes) -> Iterator[Prompt]:
    """Read lines ``key: text``; those that start with a semicolon are comments."""
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        key, colon, text = _decode_line(line).partition(":")
        if colon and not key.startswith(";"):
            yield Prompt(key.strip(), text.strip())


def _decode_line(line: bytes) -> str:
    """Decode UTF-8, and single lines that an editor of the nineties left in Latin-1."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _is_speech(prompt: Prompt) -> bool:
    """Check that the text of a prompt is what is said: no noise, no note, no damaged text."""
    if prompt.key in TONES or prompt.key.startswith("silence/"):
        return False
    return not _BRACKET.search(prompt.text) and not _LOST_LETTER.search(prompt.text)


def _describe(prompt: Prompt, language: str, *, speaker: str) -> Row:
    """Make a prompt's row; the speaker's folder is named like ``en_US_f_Allison``."""
    sentence = spell_digits(prompt.text, language)
    return Row(
        client_id=speaker,
        path=prompt.key.replace("/", "_") + ".flac",
        sentence_id=sentence_id(sentence),
        sentence=sentence,
        gender="female_feminine" if "_f_" in speaker else "male_masculine",
        locale=language,
    )


def decode_g722(file: Path) -> Samples:
    """Decode a g722 file, which has no header, to 16 kHz samples."""
    codec = G722.G722(SAMPLE_RATE, G722_BIT_RATE)
    return np.array(codec.decode(file.read_bytes()), dtype=np.int16)


def main() -> None:
    """Prepare one language and print where it is and how much it holds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--language", default="en", help=f"one of {', '.join(LANGUAGES)}")
    parser.add_argument("--cache_folder", type=Path, default=default_cache())
    options = parser.parse_args()
    print_release(prepare_prompts(language=options.language, cache_folder=options.cache_folder))


if __name__ == "__main__":
    run_main(main)

"""Fetch the telephone prompts of Debian's Asterisk packages as a Common Voice release folder.

two packages -> key: text + g722 at 16 kHz -> clips/*.flac + train, dev, test, validated.tsv
"""

import argparse
import gzip
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import G722
import numpy as np
import soundfile

from recipes.AsteriskPrompts.fetch import PASS_A_RELEASE, fetch_packages
from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds
from sbkit.data.audio_cache import default_cache
from sbkit.data.release import read_release
from sbkit.text.normalize import normalize
from sbkit.text.numbers import spell_digits

RELEASE_VERSION = 1  # raise it when the same packages would give another release
LANGUAGES = ("en", "es", "fr", "it", "ru")
SPLITS = ("train", "dev", "test")
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


@dataclass(frozen=True)
class Row:
    """One row of a release's TSV, with the columns of Common Voice in their order."""

    client_id: str
    path: str
    sentence_id: str
    sentence: str
    sentence_domain: str
    up_votes: int
    down_votes: int
    age: str
    gender: str
    accents: str
    variant: str
    locale: str
    segment: str


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
    releases = Path(cache_folder).expanduser() / "asterisk-prompts"
    finished = sorted(releases.glob(f"*-r{RELEASE_VERSION}/{language}/validated.tsv"))
    if finished:
        return finished[-1].parent
    with tempfile.TemporaryDirectory() as folder:
        packages = fetch_packages(language, Path(folder))
        release = releases / f"{packages.version}-r{RELEASE_VERSION}" / language
        with building(release) as beside:
            write_release(packages.root, language, beside)
    return release


def write_release(root: Path, language: str, release: Path) -> None:
    """Write the prompts of unpacked packages as clips and TSVs into an empty folder."""
    sounds = _only(root, "usr/share/asterisk/sounds/*")
    text = _only(root, f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-*.txt.gz")
    (release / "clips").mkdir()
    rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for prompt in read_prompts(gzip.decompress(text.read_bytes())):
        source = sounds / f"{prompt.key}.g722"
        if _is_speech(prompt) and source.is_file():
            row = _describe(prompt, language, speaker=sounds.name)
            if spoken := normalize(row.sentence, language):
                soundfile.write(release / "clips" / row.path, decode_g722(source), SAMPLE_RATE)
                rows[choose_split(spoken)].append(row)
    for split in SPLITS:
        _write_tsv(release / f"{split}.tsv", rows[split])
    _write_tsv(release / "validated.tsv", (row for split in SPLITS for row in rows[split]))


def _only(root: Path, pattern: str) -> Path:
    found = sorted(root.glob(pattern))
    if len(found) != 1:
        raise SbkitError(
            f"The packages must hold one {pattern}, but hold {len(found)}. {PASS_A_RELEASE}"
        )
    return found[0]


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
        sentence_id=hashlib.sha256(sentence.encode()).hexdigest(),
        sentence=sentence,
        sentence_domain="",
        up_votes=2,
        down_votes=0,
        age="",
        gender="female_feminine" if "_f_" in speaker else "male_masculine",
        accents="",
        variant="",
        locale=language,
        segment="",
    )


def choose_split(text: str) -> str:
    """Choose by a hash of the normalized text, so that one sentence is in one split everywhere."""
    tenth = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "dev"}.get(tenth, "train")


def decode_g722(file: Path) -> Samples:
    """Decode a g722 file, which has no header, to 16 kHz samples."""
    codec = G722.G722(SAMPLE_RATE, G722_BIT_RATE)
    return np.array(codec.decode(file.read_bytes()), dtype=np.int16)


def _write_tsv(file: Path, rows: Iterable[Row]) -> None:
    table = [tuple(field.name for field in fields(Row)), *map(astuple, rows)]
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in table), encoding="utf-8")


def summarize(release: Path) -> Iterator[str]:
    """Return a line for each split: its clips and minutes."""
    for split in SPLITS:
        clips = read_release(release / f"{split}.tsv", release.name).clips
        samples = sum(soundfile.info(clip.path).frames for clip in clips)
        minutes = samples_to_seconds(samples, SAMPLE_RATE) / 60
        yield f"{split:5} {len(clips):4} clips {minutes:5.1f} min"


def main() -> None:
    """Prepare one language and print where it is and how much it holds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--language", default="en", help=f"one of {', '.join(LANGUAGES)}")
    parser.add_argument("--cache_folder", type=Path, default=default_cache())
    options = parser.parse_args()
    try:
        release = prepare_prompts(language=options.language, cache_folder=options.cache_folder)
    except SbkitError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(release, *summarize(release), sep="\n")


if __name__ == "__main__":
    main()

"""The default corpus: the telephone prompts of Asterisk, fetched when they are first used.

two packages -> key: text + g722 at 16 kHz -> clips/*.flac + train, dev, test, validated.tsv
"""

import argparse
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import G722
import numpy as np

from recipes.debian.release import Clip, ReleaseCorpus, ReleaseRow, ensure_release, find_one
from sbkit.base.errors import ConfigError
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.data.corpus import SettingValues
from sbkit.text.languages import language_tags
from sbkit.text.normalization import normalize
from sbkit.text.verbalize import spell_numbers

LICENSES = {  # by language, from the copyright file of each package
    **dict.fromkeys(("en", "es", "fr"), "CC-BY-SA-3.0"),
    **dict.fromkeys(("it", "ru"), "CC-BY-3.0"),
}
G722_BITS_PER_SECOND = 64_000

# Keys of sounds without words, although some translators describe them without brackets.
TONE_KEYS = (
    *("ascending-2tone", "descending-2tone", "beep", "beeperr"),
    *("confbridge-join", "confbridge-leave", "tt-monkeys"),
)
_BRACKET = re.compile(r"[\[\](){}<>]")  # "[sound of monkeys screaming]", "IAX (does not say 2)"
_LOST_LETTER = re.compile(r"\?\s+[a-z]")  # "sar? esattamente": an accented letter in Italian
_PHONE_KEYS: Mapping[str, Mapping[str, str]] = {
    "en": {"*": "star", "#": "pound"},
    "es": {"*": "asterisco", "#": "numeral"},
    "fr": {"*": "étoile", "#": "dièse"},
    "it": {"*": "asterisco", "#": "cancelletto"},
    "ru": {"*": "звездочка", "#": "решетка"},
}


class AsteriskPrompts(ReleaseCorpus):
    """The default corpus, in the language or languages of a YAML."""

    name = "Asterisk prompts"
    folder = "asterisk-prompts"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        return not settings["data_folder"] and not settings["manifest"]

    def languages(self) -> Sequence[str]:
        return language_tags(self.settings["language"])

    def release(self, language: str) -> Path:
        return prepare_prompts(language=language)

    def about(self) -> Mapping[str, str]:
        return {"license": " and ".join(dict.fromkeys(LICENSES[t] for t in self.languages()))}


def prepare_prompts(*, language: str = "en") -> Path:
    """Return the release folder of a language; fetch and write it if no cache has it."""
    if language not in LICENSES:
        raise ConfigError(
            f"The default corpus has the languages {', '.join(LICENSES)}, but `language` is "
            f"{language!r}. Name the folder of a Common Voice release as `data_folder` instead.",
            keys=("language",),
        )
    name = f"asterisk-core-sounds-{language}"
    packages = (name, f"{name}-g722")
    read = partial(read_clips, language=language)
    return ensure_release(AsteriskPrompts.folder, language, packages, read)


def read_clips(root: Path, language: str) -> Iterator[Clip]:
    """Yield the spoken prompts of unpacked packages."""
    sounds = find_one(root, "usr/share/asterisk/sounds/*")
    speaker = sounds.name  # such as en_US_f_Allison
    text = find_one(root, f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-*.txt.gz")
    for key, prompt in read_prompts(gzip.decompress(text.read_bytes())):
        source = sounds / f"{key}.g722"
        sentence = spell_digits(prompt, language)
        if not (_is_speech(key, prompt) and source.is_file() and normalize(sentence, language)):
            continue
        row = ReleaseRow(
            client_id=speaker,
            path=key.replace("/", "_") + ".flac",
            sentence=sentence,
            gender="female_feminine" if "_f_" in speaker else "male_masculine",
            locale=language,
        )
        codec = G722.G722(SAMPLE_RATE, G722_BITS_PER_SECOND)  # the files have no header
        samples = np.array(codec.decode(source.read_bytes()), dtype=np.int16)
        yield row, samples, SAMPLE_RATE


def read_prompts(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the key, which names the sound file, and the text of lines ``key: text``."""
    for content_line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            line = content_line.decode("utf-8")
        except UnicodeDecodeError:
            line = content_line.decode("latin-1")  # as a few lines are
        key, colon, text = line.partition(":")
        if colon:
            yield key.strip(), text.strip()


def _is_speech(key: str, prompt: str) -> bool:
    """Check that a prompt is spoken, and that its text is neither a note nor damaged."""
    if key in TONE_KEYS or key.startswith("silence/"):
        return False
    return not _BRACKET.search(prompt) and not _LOST_LETTER.search(prompt)


def spell_digits(text: str, language: str = "en") -> str:
    """Spell the numbers and the telephone keys * and # of a text as they are read aloud."""
    for key, word in _PHONE_KEYS.get(language, {}).items():
        text = text.replace(key, f" {word} ")
    return spell_numbers(text, language)


def main() -> None:
    """Prepare one language; print its folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--language", default="en", help=f"one of {', '.join(LICENSES)}")
    print(prepare_prompts(language=parser.parse_args().language))


if __name__ == "__main__":
    run_main(main)

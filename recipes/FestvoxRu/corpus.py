"""The corpus of Debian's Russian Festival voice, fetched when it is first used.

package -> id: sentence and wav -> clips/*.flac + train, dev, test, validated.tsv
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import soundfile

from recipes.debian.release import Clip, ReleaseCorpus, ReleaseRow, ensure_release, find_one

PACKAGE = "festvox-ru"
LANGUAGE = "ru"
SPEAKER = "nsh"
_PROMPT = re.compile(r'\( (\w+) "(.*)" \)\s*')  # ( ru_0004 "+Окна многоэтажных домов." )


class FestvoxRu(ReleaseCorpus):
    """One Russian voice."""

    name = folder = PACKAGE

    def languages(self) -> Sequence[str]:
        return [LANGUAGE]

    def release(self, language: str) -> Path:
        return ensure_release(self.folder, language, (PACKAGE,), read_clips)

    def about(self) -> Mapping[str, str]:
        return {"license": "BSD-like"}


def read_clips(root: Path) -> Iterator[Clip]:
    """Yield the recorded sentences of the unpacked package."""
    voice = find_one(root, "usr/share/festival/voices/russian/*")
    for id, sentence in read_sentences((voice / "etc/txt.done.data").read_text(encoding="utf-8")):
        row = ReleaseRow(
            client_id=SPEAKER,
            path=f"{id}.flac",
            sentence=sentence,
            gender="male_masculine",
            locale=LANGUAGE,
        )
        yield row, *soundfile.read(voice / "wav" / f"{id}.wav", dtype="int16")


def read_sentences(content: str) -> Iterator[tuple[str, str]]:
    """Yield the id and the text, without stress marks, of lines ``( id "text" )``."""
    for line in content.splitlines():
        if match := _PROMPT.fullmatch(line):
            yield match[1], match[2].replace("+", "").replace('\\"', '"')

"""The corpus of Debian's Russian Festival voice, fetched when it is first used.

package -> id: sentence and wav -> clips/*.flac + train, dev, test, validated.tsv
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import soundfile

from recipes.debian.release import ReleaseRow, ensure_release, find_one, write_tsvs
from sbkit.audio.io import encode_audio
from sbkit.data.common_voice import read_releases
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions

PACKAGE = "festvox-ru"
CORPUS_LANGUAGE = "ru"
SPEAKER = "nsh"
_PROMPT = re.compile(r'\( (\w+) "(.*)" \)\s*')  # ( ru_0004 "+Окна многоэтажных домов." )


class FestvoxRu(Corpus):
    """One Russian voice."""

    name = "festvox-ru"

    def files(self) -> list[Path]:
        """Return the release folder; fetch it if it is missing."""
        return [ensure_release(PACKAGE, CORPUS_LANGUAGE, (PACKAGE,), write_release)]

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split."""
        options = TableOptions.from_settings(self.settings)
        return read_releases({CORPUS_LANGUAGE: self.files()[0]}, split, options)

    def about(self) -> Mapping[str, str]:
        return {"license": "BSD-like"}


def write_release(root: Path, release: Path) -> None:
    """Write the sentences of the unpacked package as clips and TSVs into an empty folder."""
    voice = find_one(root, "usr/share/festival/voices/russian/*")
    (release / "clips").mkdir()
    rows = []
    for id, sentence in read_sentences((voice / "etc/txt.done.data").read_text(encoding="utf-8")):
        samples, rate = soundfile.read(voice / "wav" / f"{id}.wav", dtype="int16")
        content = encode_audio(samples, rate, "FLAC")
        (release / "clips" / f"{id}.flac").write_bytes(content)
        rows.append(
            ReleaseRow(
                client_id=SPEAKER,
                path=f"{id}.flac",
                sentence=sentence,
                gender="male_masculine",
                locale=CORPUS_LANGUAGE,
            )
        )
    write_tsvs(release, rows)


def read_sentences(content: str) -> Iterator[tuple[str, str]]:
    """Yield the id and the text, without stress marks, of lines ``( id "text" )``."""
    for line in content.splitlines():
        if match := _PROMPT.fullmatch(line):
            yield match[1], match[2].replace("+", "").replace('\\"', '"')

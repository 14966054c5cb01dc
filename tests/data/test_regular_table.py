"""A table read as columns is the table read row by row, or is left to that."""

from pathlib import Path
from unittest.mock import patch

import pytest

from sbkit.data.corpora import release
from sbkit.data.corpora.clips import Clips
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.corpora.release import read_release

HEADER = "client_id\tpath\tsentence\tgender\tlocale"
ROWS = [
    "ann\ta.mp3\tHello there.\tfemale\ten",
    'bob\tb.flac\t"Quoted\t\ten',
    "\tcommon_voice_fr_1.mp3\tÉté\t\tfr",
]
REGULAR = {
    "as Common Voice writes it": "\n".join([HEADER, *ROWS]) + "\n",
    "no last line's end": "\n".join([HEADER, *ROWS]),
    "the line ends of Windows": "\r\n".join([HEADER, *ROWS]) + "\r\n",
    "empty lines": "\n\n".join([HEADER, *ROWS]) + "\n",
    "a mark at the start": "\ufeff" + "\n".join([HEADER, *ROWS]),
    "spaces in the header": "\n".join([HEADER.replace("path", " path "), *ROWS]),
    "a sentence of spaces": "\n".join([HEADER, *ROWS, "x\tz.wav\t   \t\t"]),
}
IRREGULAR = {
    "a field too few": "\n".join([HEADER, *ROWS, "x\ty.mp3\tHi"]),
    "a clip twice": "\n".join([HEADER, *ROWS, ROWS[0]]),
    "an id twice": "\n".join([HEADER, *ROWS, "x\ta.wav\tHi\t\t"]),
    "no ending": "\n".join([HEADER, *ROWS, "x\tabc\tHi\t\t"]),
    "a folder": "\n".join([HEADER, *ROWS, "x\tclips/abc.mp3\tHi\t\t"]),
    "outside": "\n".join([HEADER, *ROWS, "x\t../abc.mp3\tHi\t\t"]),
    "fields of spaces": "\n".join([HEADER, *ROWS, " \t \t \t \t "]),
}


def row_by_row(file: Path) -> Manifest:
    with patch.object(release, "to_clips", lambda *_, **__: None):
        return read_release(file, "en")


@pytest.mark.parametrize("name", [*REGULAR, *IRREGULAR])
def test_both_ways_read_the_same(tmp_path: Path, name: str) -> None:
    file = tmp_path / "train.tsv"
    file.write_bytes((REGULAR | IRREGULAR)[name].encode())
    with patch.object(release, "collect", wraps=release.collect) as collect:
        manifest = read_release(file, "en")
    assert collect.called == (name in IRREGULAR)
    plain = row_by_row(file)
    assert manifest == plain
    assert isinstance(manifest.clips, Clips)
    assert manifest.clips[1].sentence == '"Quoted'


def test_a_real_release_reads_the_same(asterisk_english: Path) -> None:
    for file in sorted(asterisk_english.glob("*.tsv")):
        assert read_release(file, "en") == row_by_row(file)

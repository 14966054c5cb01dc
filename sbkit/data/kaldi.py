"""Read data folders of Kaldi and WeNet as rows of a table: `wav.scp`, `text` and optional files.

Each file has lines "KEY VALUE". `segments` cuts the recordings of `wav.scp` into utterances.
Lhotse's own reader (1.33) takes the first channel of every file, and opens each recording.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sbkit.audio.io import has_channel
from sbkit.base.errors import DataError
from sbkit.base.files import read_text_lines
from sbkit.data.columns import (
    CHANNEL_COLUMNS,
    END_COLUMN,
    ID_COLUMNS,
    PATH_COLUMNS,
    START_COLUMN,
    TEXT_COLUMNS,
)
from sbkit.data.manifest import Excluded
from sbkit.data.tables import Row, Table, TableOptions, collect_rows

LABELS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}  # columns, by file


class Line(NamedTuple):
    """A line "KEY VALUE"."""

    number: int  # 1 for the first line
    key: str
    value: str


def is_kaldi(source: Path) -> bool:
    """Check whether a source is a data folder of Kaldi."""
    return (source / "wav.scp").is_file()


def read_kaldi(folder: Path, options: TableOptions) -> Table:
    """Return the utterances of a folder."""
    listing = folder / ("segments" if (folder / "segments").is_file() else "wav.scp")
    return collect_rows(listing, _read_utterances(listing, options))


def _read_utterances(listing: Path, options: TableOptions) -> Iterator[tuple[int, Row | Excluded]]:
    folder = listing.parent
    recordings = _read_recordings(folder)
    texts = [] if options.text_column is False else _read_lines(folder / "text")
    sentences = {line.key: line.value for line in texts}
    labels = {name: _read_if_any(folder / file) for file, name in LABELS.items()}
    genders = _read_if_any(folder / "spk2gender")
    lines = _read_lines(listing)
    for number, id, value in lines:
        fields = value.split() if listing.name == "segments" else [id, "", ""]
        if len(fields) not in (3, 4):
            detail = f"{1 + len(fields)} instead of 4 or 5"
            yield number, Excluded("", "wrong number of fields", detail)
            continue
        recording, start, end, *channel = fields
        row = recordings.get(recording)
        if row is None:
            yield number, Excluded("", "no path", f"wav.scp has no path of {recording}")
        elif sentences and id not in sentences:
            yield number, Excluded("", "no transcript", f"text has no line for {id}")
        else:
            row = {**row, ID_COLUMNS[0]: id, TEXT_COLUMNS[0]: sentences.get(id, "")}
            if start:
                row |= {START_COLUMN: start, END_COLUMN: "" if end == "-1" else end}
            if channel:
                row[CHANNEL_COLUMNS[0]] = channel[0]
            row |= {name: by_id[id] for name, by_id in labels.items() if id in by_id}
            gender = genders.get(row.get("speaker", ""))
            yield number, row if gender is None else {"gender": gender, **row}
    for id in sorted(sentences.keys() - {line.key for line in lines}):
        detail = f"text has a line for it, {listing.name} has none"
        yield 0, Excluded(id, "no audio file", detail)


def _read_recordings(folder: Path) -> dict[str, Row]:
    file = folder / "wav.scp"
    lines = _read_lines(file)
    for line in lines:
        if line.value.endswith("|") or line.value.startswith("|"):
            raise DataError(
                f"{file}: line {line.number} is a command ({line.value[:60]}). Write its audio to "
                "files and name those.",
                where=f"{file}:{line.number}",
            )
    # "RECORDING FILE CHANNEL", with names for scoring
    values = _read_if_any(folder / "reco2file_and_channel")
    channels = {id: value.split()[-1] for id, value in values.items()}
    num_recordings = Counter(line.value for line in lines)  # by path; one may be one side already
    rows: dict[str, Row] = {}
    for _, id, path in lines:
        # Kaldi's scripts run in a folder above, to which paths are relative.
        files = (str(base / path) for base in (folder, *folder.parents))
        source = next(filter(os.path.isfile, files), path)
        rows[id] = {PATH_COLUMNS[0]: source}
        is_side = num_recordings[path] > 1 or has_channel(source, 1)
        if id in channels and is_side:
            rows[id][CHANNEL_COLUMNS[0]] = channels[id]
    return rows


def _read_if_any(file: Path) -> dict[str, str]:
    return {line.key: line.value for line in _read_lines(file)} if file.is_file() else {}


def _read_lines(file: Path) -> list[Line]:
    subject = f"The file {file.name} of a data folder of Kaldi"
    lines: list[Line] = []
    text = read_text_lines(file, subject=subject)
    for number, line in enumerate(text, start=1):
        fields = line.strip().split(maxsplit=1)
        if fields:
            lines.append(Line(number, fields[0], fields[1] if len(fields) > 1 else ""))
    return lines

"""Read what Lhotse (1.33) describes as rows of tables: manifests of cuts, and Lhotse Shar.

A cut with a single supervision is a row; of one with several, each supervision is a row, as
`CutSet.trim_to_supervisions` makes it. Mixed and padded cuts, supervisions of several channels, and
cuts that change the sound (speed, volume ...) are excluded.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import fsspec

from sbkit.base.errors import DataError
from sbkit.base.imports import require_package
from sbkit.base.units import MICROSECONDS
from sbkit.data.columns import USUAL_COLUMNS
from sbkit.data.filesystem import UNPACKING_ERRORS, find_beside
from sbkit.data.manifest import MAX_OVERLAP, Excluded
from sbkit.data.tables import Row, Table, TableOptions, collect_rows, join_tables

if TYPE_CHECKING:
    from lhotse.cut import Cut

PATH_COLUMNS, TEXT_COLUMNS, ID_COLUMNS, CHANNEL_COLUMNS = (
    USUAL_COLUMNS[role] for role in ("path", "text", "id", "channel")
)
OFFSET_COLUMN, LENGTH_COLUMN = "offset", "duration"
WriteAudio = Callable[[bytes, str], Path]
SUFFIXES = (".jsonl.gz", ".jsonl")
CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
TOLERANCE = MAX_OVERLAP / MICROSECONDS  # seconds that a supervision may exceed its cut
MAX_SILENCE = 1.0  # seconds around the only supervision of a cut that stay with it
MANIFEST_ROWS = 50_000  # in memory at a time, as Lhotse's objects
RECORDINGS = "recording"  # the field of Shar that has the audio of cuts


def is_cut_manifest(source: Path) -> bool:
    """Check whether the first line of a file is a cut."""
    if not source.name.endswith(SUFFIXES) or not source.is_file():
        return False
    try:
        with fsspec.open(source, "rt", encoding="utf-8-sig", compression="infer") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "null"))
    except UNPACKING_ERRORS:  # `read_table` says what to do
        return False
    return isinstance(first, dict) and first.get("type") in CUT_TYPES


def read_cuts(source: Path, options: TableOptions) -> Table:
    """Return the rows of a manifest of cuts; relative paths are relative to its folder."""
    cuts = _iterate(
        require_package("lhotse", extra="corpora").CutSet.from_file(source), str(source)
    )
    return join_tables(_read_batches(cuts, source, options, MANIFEST_ROWS), str(source))


def read_prepared(recordings: Path, supervisions: Path, options: TableOptions) -> Table:
    """Return the rows of the two manifests of a split that `lhotse prepare` writes."""
    lhotse = require_package("lhotse", extra="corpora")
    recording_set = lhotse.RecordingSet.from_file(recordings)
    supervision_set = lhotse.SupervisionSet.from_file(supervisions)
    cuts = lhotse.CutSet.from_manifests(recording_set, supervision_set)
    table = join_tables(
        _read_batches(iter(cuts), recordings, options, MANIFEST_ROWS), str(recordings)
    )
    known_ids = {recording.id for recording in recording_set}
    detail = f"{recordings.name} has no recording of it"
    missing = [
        Excluded(supervision.id, "no audio file", detail)
        for supervision in supervision_set
        if supervision.recording_id not in known_ids
    ]
    return replace(table, excluded=[*table.excluded, *missing])


def cuts_of_tar(file: str) -> str | None:
    """Return the cuts of a tar of Lhotse Shar, a file or URL; None for any other tar."""
    name = file.rpartition("/")[2]
    field, _, number = name.partition(".tar")[0].partition(".")
    if field != RECORDINGS:
        return None
    return find_beside(file, [f"cuts.{number}{suffix}" for suffix in SUFFIXES])


def read_shar(
    tar: str, cuts: str, options: TableOptions, batch_rows: int, write_audio: WriteAudio
) -> Iterator[Table]:
    """Yield the rows of a tar of recordings and its cuts, once their audio is written.

    Files at a URL are copied to this machine first.
    """
    with TemporaryDirectory() as folder:
        copies = [_copy(file, folder) for file in (cuts, tar)]
        cut_set = require_package("lhotse", extra="corpora").CutSet.from_shar(
            {"cuts": copies[:1], RECORDINGS: copies[1:]}
        )
        iterator = _iterate(cut_set, tar, total=len(cut_set))
        yield from _read_batches(iterator, Path(tar), options, batch_rows, write_audio)


def _copy(file: str, folder: str) -> str:
    if "://" not in file:
        return file
    filesystem, path = fsspec.url_to_fs(file)
    copy = f"{folder}/{file.rpartition('/')[2]}"
    filesystem.get_file(path, copy)
    return copy


def _iterate(cuts: Iterable["Cut"], source: str, total: int = 0) -> Iterator["Cut"]:
    count = 0
    try:
        for cut in cuts:
            count += 1
            yield cut
        if count < total:
            raise EOFError(f"{total} were expected")
    # Lhotse asserts, and takes the fields that it needs from mappings.
    except (*UNPACKING_ERRORS, AssertionError, LookupError) as error:
        raise DataError(
            f"{source} cannot be read after cut {count} ({type(error).__name__}: "
            f"{str(error)[:200]})."
        ) from error


def _read_batches(
    cuts: Iterator["Cut"],
    source: Path,
    options: TableOptions,
    batch_rows: int,
    write_audio: WriteAudio | None = None,
) -> Iterator[Table]:
    numbered = enumerate(cuts, start=1)
    while batch := list(islice(numbered, batch_rows)):
        rows = (
            (number, row) for number, cut in batch for row in _read_cut(cut, options, write_audio)
        )
        yield collect_rows(str(source), rows)


def _read_cut(
    cut: "Cut", options: TableOptions, write_audio: WriteAudio | None
) -> Iterator[Row | Excluded]:
    """Yield the rows of a cut, or why there is none."""
    fault = _find_fault(cut, "file" if write_audio is None else "memory")
    if fault is not None:
        yield fault
        return
    if not cut.supervisions:
        if not options.has_text:
            yield _to_row(cut, cut.id, cut.start, cut.end, cut.channel, write_audio)
        else:
            yield Excluded(cut.id, "no transcript", "the cut has no supervision")
    for supervision in cut.supervisions:
        id, start, end = supervision.id, cut.start + supervision.start, cut.start + supervision.end
        if start < cut.start - TOLERANCE or end > cut.end + TOLERANCE:
            times = f"{start:g} to {end:g} s in a cut from {cut.start:g} to {cut.end:g} s"
            yield Excluded(id, "transcript of more than its cut", f"speech from {times}")
            continue
        if len(cut.supervisions) == 1:
            id = cut.id
            if end - start > cut.duration - MAX_SILENCE:
                start, end = cut.start, cut.end
        # A MultiCut has all channels of a recording, and each supervision its own.
        channel = cut.channel if isinstance(cut.channel, int) else supervision.channel
        start, end = max(start, cut.start), min(end, cut.end)
        row = _to_row(cut, id, start, end, channel, write_audio)
        labels = {
            TEXT_COLUMNS[0]: supervision.text,
            "speaker": supervision.speaker,
            "language": supervision.language,
            "gender": supervision.gender,
        }
        labels = {name: label for name, label in labels.items() if label}
        yield row if isinstance(row, Excluded) else {**row, **labels}


def _to_row(
    cut: "Cut",
    id: str,
    start: float,
    end: float,
    channel: object,
    write_audio: WriteAudio | None,
) -> Row | Excluded:
    """Return the columns of a part of the recording of a cut, from ``start`` to ``end`` (s)."""
    sources = [source for source in cut.recording.sources if channel in source.channels]
    if not sources:
        return Excluded(id, "not one channel", f"it has the channels {channel}")
    path, channels = sources[0].source, sources[0].channels
    if write_audio is not None:
        path = write_audio(path, cut.id)
    row = {PATH_COLUMNS[0]: str(path), ID_COLUMNS[0]: id}
    row |= {OFFSET_COLUMN: repr(start), LENGTH_COLUMN: repr(end - start)}
    if len(channels) > 1:  # they count from 0 in the file, but may have any numbers here
        row[CHANNEL_COLUMNS[0]] = str(channels.index(channel))
    return row


def _find_fault(cut: "Cut", source_type: str) -> Excluded | None:
    """Return why a cut is not a part of an audio file."""
    recording = cut.recording if hasattr(cut, "recording") else None
    if recording is None:
        return Excluded(cut.id, "not a part of a recording", type(cut).__name__)
    types = {source.type for source in recording.sources}
    if types != {source_type}:
        return Excluded(cut.id, "not a file on this machine", f"audio from {', '.join(types)}")
    changes = {type(change).__name__ for change in recording.transforms or ()}
    if changes - {"Resample"}:  # sbkit resamples, too
        return Excluded(cut.id, "changed sound", ", ".join(sorted(changes)))
    return None

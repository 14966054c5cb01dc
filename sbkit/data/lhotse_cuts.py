"""Read the cut manifests of Lhotse: JSON Lines, plain or compressed, with a cut on each line.

A MonoCut is a part of one channel of a recording. A cut with one supervision is a clip; of a cut
with several, each supervision is a clip, as `CutSet.trim_to_supervisions` makes it. A recording
must be one file. Cuts of several channels or tracks, and those that change the sound (speed,
volume ...), are excluded. The format is that of Lhotse 1.33.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec

from sbkit.base.errors import DataError
from sbkit.base.units import MICROSECONDS
from sbkit.data.manifest import MAX_OVERLAP, Clip, Excluded
from sbkit.data.tables import TableOptions, locate, to_part

COMPRESSED = ".jsonl.gz"
SUFFIXES = (COMPRESSED, ".jsonl")
CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
COLUMNS = ("speaker", "language", "gender")  # of a supervision
TOLERANCE = MAX_OVERLAP / MICROSECONDS  # seconds that a supervision may exceed its cut

Cut = Mapping[str, Any]


def is_cut_manifest(source: Path) -> bool:
    """Check whether a file has cuts; raise DataError for a compressed file of something else."""
    if not source.name.endswith(SUFFIXES) or not source.is_file():
        return False
    try:
        first = next((values for _, values in read_json_lines(str(source))), None)
    except DataError:
        if source.name.endswith(COMPRESSED):
            raise
        return False  # `read_table` says what to do
    is_cut = isinstance(first, dict) and first.get("type") in CUT_TYPES
    if not is_cut and source.name.endswith(COMPRESSED):
        raise DataError(
            f"The first line of {source} is not a cut of Lhotse. Make cuts of recordings and "
            "supervisions with `lhotse cut simple`; unpack any other manifest with gunzip."
        )
    return is_cut


def read_json_lines(source: str) -> Iterator[tuple[int, object]]:
    """Yield the number and the value of each line; the value of an invalid line is its error.

    source: a file or a URL, compressed if it ends in .gz.
    """
    try:
        with fsspec.open(source, "rt", encoding="utf-8-sig", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    yield number, error
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{source} is damaged ({error}). Copy it again.") from error


def read_cuts(source: Path, options: TableOptions) -> Iterator[Clip | Excluded]:
    """Yield the clips of a cut manifest; relative paths are relative to its folder."""
    for number, cut in read_json_lines(str(source)):
        try:
            if not isinstance(cut, Mapping):
                raise TypeError(str(cut))
            path = _find_file(cut, source.parent)
            yield from [*read_cut(cut, path, options, channel=_find_channel(cut))]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            detail = f"{type(error).__name__}: {error}"
            yield Excluded(f"row {number}", "not a cut of Lhotse", detail)


def read_cut(
    cut: Cut, path: str | Excluded, options: TableOptions, *, channel: int | None = None
) -> Iterator[Clip | Excluded]:
    """Yield the clips of a cut of the file at ``path``, or why there is none.

    channel: of the file, counted from 0.
    """
    id = str(cut["id"])
    if isinstance(path, Excluded):
        yield replace(path, id=id)
        return
    start = float(cut["start"])
    end = start + float(cut["duration"])
    supervisions = cut["supervisions"]
    if options.text_column is False:
        supervisions = [{**(supervisions or [{}])[0], "start": 0, "duration": 0, "text": ""}]
    if not supervisions:
        yield Excluded(id, "no transcript", "the cut has no supervision")
    for supervision in supervisions:
        first = start + float(supervision["start"])
        last = first + float(supervision["duration"])
        detail = f"speech from {first:g} to {last:g} s in a cut from {start:g} to {end:g} s"
        is_within = first >= start - TOLERANCE and last <= end + TOLERANCE
        if len(supervisions) == 1:
            first, last = start, end
        else:
            id = str(supervision["id"])
        part = to_part(path, max(start, first), min(end, last), channel)
        if not is_within:
            yield Excluded(id, "transcript of more than its cut", detail)
        elif isinstance(part, Excluded):
            yield replace(part, id=id)
        else:
            columns = {name: str(supervision[name]) for name in COLUMNS if supervision.get(name)}
            columns.setdefault("language", options.language)
            text = str(supervision.get("text") or "")
            yield Clip(id, Path(path), text, columns, *part[1:])


def _find_file(cut: Cut, folder: Path) -> str | Excluded:
    """Return the path of the recording of a cut."""
    if cut["type"] != "MonoCut" or "recording" not in cut:
        return Excluded("", "not a MonoCut of a recording", str(cut["type"]))
    recording = cut["recording"]
    kinds = [str(source["type"]) for source in recording["sources"]]
    if kinds != ["file"]:
        return Excluded("", "not a file on this machine", f"audio from {', '.join(kinds)}")
    (source,) = recording["sources"]
    changes = {change["name"] for change in recording.get("transforms") or ()}
    if changes - {"Resample"}:  # sbkit resamples, too
        return Excluded("", "changed sound", ", ".join(sorted(changes)))
    return locate(folder, str(source["source"]))


def _find_channel(cut: Cut) -> int | None:
    """Return the position of a cut's channel among several of its file."""
    channels = [*cut["recording"]["sources"][0]["channels"]] if "recording" in cut else []
    return channels.index(cut["channel"]) if len(channels) > 1 else None

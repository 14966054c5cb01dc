"""Read the cut manifests of Lhotse: JSON Lines, plain or compressed, with a cut on each line.

A MonoCut is a part of one channel of a recording. A cut with one supervision is a clip; of a cut
with several, each supervision is a clip, as `CutSet.trim_to_supervisions` makes it. A recording
must be one file of one channel. Cuts of several channels or tracks, and those that change the sound
(speed, volume ...), are excluded. The format is that of Lhotse 1.33.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import DataError
from sbkit.data.manifest import MAX_OVERLAP, Clip, Excluded
from sbkit.data.tables import TableOptions, locate, to_part

COMPRESSED = ".jsonl.gz"
SUFFIXES = (COMPRESSED, ".jsonl")
CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
COLUMNS = ("speaker", "language", "gender")  # of a supervision
TOLERANCE = MAX_OVERLAP / 1e6  # seconds that a supervision may exceed its cut
NOT_A_CUT = "not a cut of Lhotse"

Cut = Mapping[str, Any]


def is_cut_manifest(source: Path) -> bool:
    """Check whether a file has cuts; raise DataError for a compressed file of something else."""
    if not source.name.endswith(SUFFIXES) or not source.is_file():
        return False
    try:
        first = next((values for _, values in _read_objects(source)), None)
    except UnicodeDecodeError:  # `read_table` says what to do
        return False
    is_cut = isinstance(first, dict) and first.get("type") in CUT_TYPES
    if not is_cut and source.name.endswith(COMPRESSED):
        raise DataError(
            f"The first line of {source} is not a cut of Lhotse. Make cuts of recordings and "
            "supervisions with `lhotse cut simple`; unpack any other manifest with gunzip."
        )
    return is_cut


def _read_objects(source: Path) -> Iterator[tuple[int, object]]:
    """Yield the number and the value of each line; a line that is not JSON is an error."""
    open_file = gzip.open if source.name.endswith(COMPRESSED) else open
    try:
        with open_file(source, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    yield number, error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{source} is damaged ({error}). Copy it again.") from error


def read_cuts(source: Path, options: TableOptions) -> Iterator[Clip | Excluded]:
    """Yield the clips of a cut manifest; relative paths are relative to its folder."""
    for number, cut in _read_objects(source):
        try:
            if not isinstance(cut, Mapping):
                raise TypeError(str(cut))
            yield from _read_cut(cut, source.parent, options)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            detail = f"{type(error).__name__}: {error}"
            yield Excluded(f"row {number}", NOT_A_CUT, detail)


def _read_cut(cut: Cut, folder: Path, options: TableOptions) -> list[Clip | Excluded]:
    id = str(cut["id"])
    path = _find_file(cut, folder)
    if isinstance(path, Excluded):
        return [Excluded(id, path.reason, path.detail)]
    start = float(cut["start"])
    end = start + float(cut["duration"])
    supervisions = list(cut["supervisions"])
    if options.text_column is False:
        return [_make_clip(id, path, start, end, supervisions[0] if supervisions else {}, options)]
    if not supervisions:
        return [Excluded(id, "no transcript", "the cut has no supervision")]
    clips: list[Clip | Excluded] = []
    for supervision in supervisions:
        first = start + float(supervision["start"])
        last = first + float(supervision["duration"])
        is_only = len(supervisions) == 1
        name = id if is_only else str(supervision["id"])
        if first < start - TOLERANCE or last > end + TOLERANCE:
            detail = (
                f"speech from {first:g} to {last:g} s, of which the cut has {start:g} to {end:g} s"
            )
            clips.append(Excluded(name, "transcript of more than its cut", detail))
        else:
            times = (start, end) if is_only else (max(start, first), min(end, last))
            clips.append(_make_clip(name, path, *times, supervision, options))
    return clips


def _find_file(cut: Cut, folder: Path) -> str | Excluded:
    """Return the path of the recording of a cut."""
    if cut["type"] != "MonoCut":
        return Excluded("", "not a MonoCut", str(cut["type"]))
    recording = cut.get("recording")
    if not recording:
        return Excluded("", "no audio file", "the cut has no recording")
    sources = recording["sources"]
    kinds = [str(source["type"]) for source in sources]
    if kinds != ["file"]:
        return Excluded("", "not a file on this machine", f"audio from {', '.join(kinds)}")
    channels = sources[0]["channels"]
    if len(channels) != 1:
        return Excluded("", "one of several channels", f"channel {cut['channel']} of {channels}")
    # sbkit resamples, too.
    names = {change["name"] for change in recording.get("transforms") or ()} - {"Resample"}
    if names:
        return Excluded("", "changed sound", ", ".join(sorted(names)))
    return locate(folder, str(sources[0]["source"]))


def _make_clip(
    id: str, path: str, start: float, end: float, supervision: Cut, options: TableOptions
) -> Clip | Excluded:
    part = to_part(path, start, end)
    if isinstance(part, Excluded):
        return Excluded(id, part.reason, part.detail)
    columns = {name: str(supervision[name]) for name in COLUMNS if supervision.get(name)}
    columns.setdefault("language", options.language)
    text = "" if options.text_column is False else str(supervision.get("text") or "")
    return Clip(id, Path(path), text, columns, part.start, part.end)

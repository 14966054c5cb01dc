"""The results of `sbkit transcribe --out`: their names, and the record of what they were made from.

A result is named as its recording below the given folder. A name that another recording has in the
record stays with it, and the newcomer's result keeps its suffix: talk.srt, talk.mp3.srt.

sbkit-results.jsonl         a line for each result, appended once the result is written
sbkit-results.K-of-N.jsonl  the lines of a share; all such files are read
"""

import errno
import hashlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from json import loads
from pathlib import Path
from typing import Any

from sbkit.base.checksums import checksum, read_checksums
from sbkit.base.errors import DataError
from sbkit.base.files import (
    from_plain,
    fsync,
    require_writable,
    task_lock,
    to_json,
    write_text_atomically,
)
from sbkit.base.messages import listed, printable
from sbkit.tasks.recognition.recordings import Recording

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # not of one name alone
# Simple options without an effect on the text; all others are compared with the record.
NEUTRAL_OPTIONS = ("command", "opens_bundle", "bundle", "out", "again", "errors", "quiet", "device")


@dataclass(frozen=True)
class Entry:
    """A line of the record. Versions are a file's size (bytes) and time (ns); () without a file."""

    result: str  # below the folder of the record
    result_version: tuple[int, ...]  # as it was written
    recording: str  # its id
    recording_version: tuple[int, ...]
    model: str  # a digest of the bundle
    options: Mapping[str, Any]  # with an effect on the text


REASONS = {
    "recording_version": "recording changed",
    "model": "model changed",
    "options": "options changed",
}


class PrintedResults:
    """Results on standard output."""

    def __init__(self, *, with_names: bool) -> None:
        """Print the texts; with names, after the path of the recording and a tab."""
        self._with_names = with_names

    def reason(self, recording: Recording) -> str | None:
        """Return why the result of a recording is due, or None if it is done."""
        return "new"

    def refusal(self, recording: Recording) -> DataError | None:
        """Return an error if the due result would replace a file that is not as recorded."""
        return None

    def write(self, recording: Recording, text: str) -> None:
        """Write a result.

        Raises DataError if its file cannot be written; OSError if none can, as on a full disk.
        """
        print(f"{printable(str(recording.path))}\t{text}" if self._with_names else text, flush=True)


class Results(PrintedResults):
    """Results in a folder; the names are the same for all shares of the recordings."""

    def __init__(self, options: Namespace, recordings: Sequence[Recording]) -> None:
        require_writable(options.out, option="--out")
        self._folder: Path = options.out
        share = options.share
        part = f".{share.number}-of-{share.total}" if share else ""
        self._record = options.out / f"sbkit-results{part}.jsonl"
        self._recorded = {entry.result: entry for entry in _read_record(options.out)}
        self._again = options.again
        suffix = ".txt" if options.format == "text" else f".{options.format}"
        names = assign_names(recordings, self._recorded.values(), suffix)
        model = _digest(options.bundle)
        effective_options = text_options(options)
        self._planned = {
            recording.id: Entry(
                names[recording.id],
                _version(options.out / names[recording.id]),
                recording.id,
                _version(recording.path),
                model,
                effective_options,
            )
            for recording in recordings
        }

    def reason(self, recording: Recording) -> str | None:
        planned = self._planned[recording.id]
        recorded = self._recorded.get(planned.result)
        if recorded is None:
            return "new"
        if not planned.result_version:
            return "result missing"
        changed = (name for name in REASONS if getattr(planned, name) != getattr(recorded, name))
        return next(map(REASONS.get, changed), "again" if self._again else None)

    def refusal(self, recording: Recording) -> DataError | None:
        planned = self._planned[recording.id]
        recorded = self._recorded.get(planned.result)
        if self._again or not planned.result_version:
            return None
        if recorded is not None and recorded.result_version == planned.result_version:
            return None
        state = "is not in the record" if recorded is None else "was edited"
        return DataError(
            f"{recording.path}: {self._folder / planned.result} {state}, so it is kept. Move it "
            "away, or overwrite it by --again."
        )

    def write(self, recording: Recording, text: str) -> None:
        planned = self._planned[recording.id]
        file = self._folder / planned.result
        with task_lock(self._folder, planned.result, wait=True):
            if _version(file) != planned.result_version:
                raise DataError(f"{file} was written by another command. Start again.")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomically(file, f"{text}\n")
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    raise
                raise DataError(f"{file} cannot be written ({error.strerror}).") from error
            self._append(replace(planned, result_version=_version(file)))

    def _append(self, entry: Entry) -> None:
        with self._record.open("a+b") as record:
            if record.tell():
                record.seek(-1, os.SEEK_END)
                if record.read() != b"\n":  # the last line was cut off
                    record.write(b"\n")
            record.write(f"{to_json(asdict(entry))}\n".encode())
            record.flush()
            fsync(record.fileno())


def _read_record(folder: Path) -> list[Entry]:
    """Return the readable lines of all shares, the latest result last."""
    entries: list[Entry] = []
    for file in folder.glob("sbkit-results*.jsonl"):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):  # it is damaged
                entries.append(from_plain(Entry, loads(line)))
    return sorted(entries, key=lambda entry: entry.result_version[1:])


def assign_names(
    recordings: Iterable[Recording], recorded: Iterable[Entry], suffix: str
) -> dict[str, str]:
    """Return the name of each recording's result, by id.

    A share that starts late finds names of an early one in the record, and still gives the others
    the same names: what it finds are those that it would have given.
    """
    owners = {entry.result: entry.recording for entry in recorded}
    names = {owner: name for name, owner in owners.items() if name.endswith(suffix)}
    longer_names: list[str] = []
    for recording in sorted(recordings, key=lambda recording: recording.id):
        if recording.id not in names:
            candidates = [f"{recording.name.with_suffix('')}{suffix}"]
            while owners.setdefault(candidates[-1], recording.id) != recording.id:
                number = f".{len(candidates)}" if len(candidates) > 1 else ""
                candidates.append(f"{recording.name}{number}{suffix}")
            names[recording.id] = candidates[-1]
            longer_names += candidates[1:][-1:]
    if longer_names:
        line = f"Shorter names belong to other recordings: {listed(longer_names)}"
        print(printable(line), file=sys.stderr)
    return names


def _version(file: Path) -> tuple[int, ...]:
    with suppress(OSError):  # it is missing, or its name is too long
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    return ()


def text_options(options: Namespace) -> dict[str, Any]:
    """Return the options with an effect on the text; a file or bundle stands for its content."""
    values = vars(options).items()
    given = {name: value for name, value in values if isinstance(value, str | int | float | Path)}
    return {name: _content(given[name]) for name in given.keys() - {*NEUTRAL_OPTIONS}}


def _content(value: Any) -> Any:
    with suppress(OSError, TypeError, ValueError):  # it is no path
        if Path(value).is_file():
            return checksum(Path(value))
        if Path(value).is_dir():
            return _digest(Path(value))
    return value


def _digest(bundle: Path) -> str:
    return hashlib.sha256(to_json(read_checksums(bundle)).encode()).hexdigest()

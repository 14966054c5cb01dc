"""The results of `sbkit transcribe --out`: their names, and the record of what they were made from.

A result is named as its recording below the given folder. A name that another recording has in the
record stays with it, and the newcomer's result keeps its suffix: talk.srt, talk.mp3.srt.

sbkit-results.jsonl         a line for each result, appended once the result is written
sbkit-results.K-of-N.jsonl  the lines of a share; all such files are read
"""

import errno
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sbkit.base import files
from sbkit.base.checksums import CHECKSUMS, checksum
from sbkit.base.errors import DataError
from sbkit.base.messages import listed, printable
from sbkit.tasks.recognition.recordings import absolute_name

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # not of one name alone
# Simple options without an effect on the text; all others are compared with the record.
NEUTRAL_OPTIONS = ("command", "opens_bundle", "bundle", "out", "again", "errors", "quiet", "device")


@dataclass(frozen=True)
class Entry:
    """A line of the record; versions are a size in bytes and a time in ns, zeros without a file."""

    result: str  # its path below the folder of the record
    version: tuple[int, ...]  # of the result
    recording: str  # its absolute path
    made_from: Mapping[str, Any]  # the version of the recording, the model and the options


NO_ENTRY = Entry("", (0, 0), "", {})


class Results:
    """The results of recordings in a folder; the names are the same for all shares."""

    def __init__(self, options: Namespace, recordings: Mapping[Path, Path]) -> None:
        """Plan the results of recordings, each given with its name."""
        files.require_writable(options.out, option="--out")
        self._folder: Path = options.out
        self._again = options.again
        share = f".{options.share.number}-of-{options.share.total}" if options.share else ""
        self._record = options.out / f"sbkit-results{share}.jsonl"
        with self._record.open("a+b") as record:
            record.seek(0)
            if record.read()[-1:] not in (b"", b"\n"):  # killed within its last line
                record.write(b"\n")
        self._recorded = {entry.result: entry for entry in _read_record(options.out)}
        suffix = ".txt" if options.format == "text" else f".{options.format}"
        common = {"model": _content(options.bundle), "options": text_options(options)}
        self._planned: dict[Path, Entry] = {}
        for file, name in assign_names(recordings, self._recorded.values(), suffix).items():
            made_from = {"recording": [*files.size_and_mtime(file)], **common}
            version = files.size_and_mtime(options.out / name)
            self._planned[file] = Entry(name, version, absolute_name(file), made_from)

    def due(self, recordings: Iterable[Path]) -> dict[Path, DataError | None]:
        """Return the recordings without a current result, and print why.

        Those whose result must not be overwritten have an error.
        """
        due: dict[Path, DataError | None] = {}
        reasons: Counter[str] = Counter()
        for file in recordings:
            planned = self._planned[file]
            recorded = self._recorded.get(planned.result, NO_ENTRY)
            if reason := self._reason(planned, recorded):
                reasons[reason] += 1
                due[file] = None
                is_foreign = planned.version not in (NO_ENTRY.version, recorded.version)
                if is_foreign and not self._again:
                    due[file] = DataError(
                        f"{self._folder / planned.result} was edited, or is not in the record, "
                        "and is kept. Move it away, or pass --again."
                    )
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        print(f"To transcribe: {counts or 'none'}", file=sys.stderr)
        return due

    def _reason(self, planned: Entry, recorded: Entry) -> str | None:
        if recorded is NO_ENTRY:
            return "new"
        if planned.version == NO_ENTRY.version:
            return "result missing"
        now, before = planned.made_from, recorded.made_from
        changes = (f"{name} changed" for name in now if before.get(name) != now[name])
        return next(changes, "again" if self._again else None)

    def write(self, recording: Path, text: str) -> None:
        """Write a result and its line of the record.

        Raises DataError if it cannot be written there; OSError if nothing can, as on a full disk.
        """
        planned = self._planned[recording]
        file = self._folder / planned.result
        with files.task_lock(self._folder, planned.result, wait=True):
            if files.size_and_mtime(file) != planned.version:
                raise DataError(f"{file} was written by another command. Start again.")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                files.write_text_atomically(file, text)
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    raise
                raise DataError(f"{file} cannot be written ({error.strerror}).") from error
            line = files.to_json(asdict(replace(planned, version=files.size_and_mtime(file))))
            with self._record.open("ab") as record:
                record.write(f"{line}\n".encode())


def _read_record(folder: Path) -> list[Entry]:
    """Return the readable lines of all shares, those of the latest results last."""
    entries: list[Entry] = []
    for file in folder.glob("sbkit-results*.jsonl"):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):  # it is damaged
                entries.append(files.from_plain(Entry, json.loads(line)))
    return sorted(entries, key=lambda entry: entry.version[1:])


def assign_names(
    recordings: Mapping[Path, Path], recorded: Iterable[Entry], suffix: str
) -> dict[Path, str]:
    """Return the name of each recording's result.

    A share that starts late finds names of an early one in the record, and gives the others the
    same names: those in the record are what it would have given.
    """
    owners = {entry.result: entry.recording for entry in recorded}
    names = {owner: name for name, owner in owners.items() if name.endswith(suffix)}
    longer_names: list[str] = []
    for owner, name in sorted((absolute_name(file), name) for file, name in recordings.items()):
        number = 0
        while owner not in names:
            stem = [name.with_suffix(""), name, f"{name}.{number}"][min(number, 2)]
            if owners.setdefault(f"{stem}{suffix}", owner) == owner:
                names[owner] = f"{stem}{suffix}"
                longer_names += [names[owner]] * (number > 0)
            number += 1
    if longer_names:
        line = f"Shorter names belong to other recordings: {listed(longer_names)}"
        print(printable(line), file=sys.stderr)
    return {file: names[absolute_name(file)] for file in recordings}


def text_options(options: Namespace) -> dict[str, Any]:
    """Return the options with an effect on the text."""
    return {
        name: _content(value)
        for name, value in vars(options).items()
        if isinstance(value, str | int | float | Path) and name not in NEUTRAL_OPTIONS
    }


def _content(value: Any) -> str:
    """Return the checksum of a file or a bundle that a value names, or the value."""
    with suppress(OSError, TypeError, ValueError):  # it names none
        return checksum(Path(value, CHECKSUMS) if Path(value).is_dir() else Path(value))
    return str(value)

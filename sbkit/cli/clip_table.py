"""A table of clips to train on, which may take several attempts to make.

items (recordings, lines of a text) -> a line of TABLE.progress.jsonl for each -> TABLE.csv

The progress file has the rows of each finished item. A command that was stopped, even by `kill -9`,
continues from it when it is started again. At the end, the table is made from it.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import os_errors_name, try_lock, write_text_atomically
from sbkit.base.messages import printable

MAX_STEM_LENGTH = 50  # characters of a recording's name in the ids of its utterances

Item = TypeVar("Item")
OutputRow = dict[str, Any]


class Share(NamedTuple):
    """One of several shares of a list, which differ by at most one item: `--share 3/16`.

    >>> parse_share("2/3").of("abcdefgh")
    'beh'
    """

    number: int = 1  # from 1 to the total
    total: int = 1

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        return items[self.number - 1 :: self.total]


def parse_share(text: str) -> Share:
    """Parse K/N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"`--share` must be K/N with K from 1 to N, such as 3/16, but is {text}.")
    return Share(int(match[1]), int(match[2]))


@dataclass
class ClipTable:
    """A table that `open_clip_table` has opened.

    rows: the rows of each finished item.
    sizes: the sizes in bytes of the finished items that are files.
    """

    file: Path
    progress: FileIO
    rows: dict[str, list[OutputRow]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def unfinished(self, items: Sequence[str]) -> list[str]:
        return [item for item in items if item not in self.rows]

    def require_unchanged(self, files: Iterable[str]) -> None:
        """Raise DataError if a finished file has another size: its rows came from other audio."""
        for file in files:
            if file in self.sizes and Path(file).stat().st_size != self.sizes[file]:
                raise DataError(
                    f"{file} has changed since {self.file} was written. Choose another --out."
                )

    def add(self, item: str, rows: list[OutputRow], **size: int) -> None:
        """Add the rows of a finished item, and its `size` in bytes if it is a file."""
        self.rows[item] = rows
        self.write_progress({"item": item, "rows": rows, **size})

    def write_progress(self, entry: Mapping[str, Any]) -> None:
        line = f"{json.dumps(entry)}\n".encode()
        with os_errors_name(Path(self.progress.name)):
            while line:  # a write without a buffer may be partial
                line = line[self.progress.write(line) :]

    def read_progress(self, settings: Mapping[str, Any]) -> None:
        """Read the finished items; raise ConfigError if they were made with other settings."""
        content = Path(self.progress.name).read_bytes()
        *lines, cut_off = content.split(b"\n")
        self.progress.truncate(len(content) - len(cut_off))
        if not lines:
            self.write_progress(settings)
            return
        first_settings, *entries = map(json.loads, lines)
        names = [name for name in settings if first_settings.get(name) != settings[name]]
        if names:
            raise ConfigError(
                f"{self.file} was begun with another {', '.join(names).replace('_', ' ')}. Choose "
                "another name or folder."
            )
        self.rows |= {entry["item"]: entry["rows"] for entry in entries}
        self.sizes |= {entry["item"]: entry["size"] for entry in entries if "size" in entry}

    def sorted_rows(self) -> list[OutputRow]:
        return [row for item in sorted(self.rows) for row in self.rows[item]]

    def write(self, columns: Sequence[str], rows: Iterable[OutputRow], summary: str) -> None:
        """Write the table and print a line about it."""
        content = io.StringIO()
        writer = csv.DictWriter(content, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text_atomically(self.file, content.getvalue())
        print(printable(f"{self.file}: {summary}"), flush=True)


@contextmanager
def open_clip_table(file: Path, settings: Mapping[str, Any]) -> Iterator[ClipTable]:
    """Open a table with the items that earlier commands have finished.

    settings: what the rows depend on besides the item, as plain data.
    """
    progress_file = file.with_suffix(".progress.jsonl")
    if file.exists() and not progress_file.exists():
        raise ConfigError(f"{file} was not written by this command. Choose another name or folder.")
    with progress_file.open("ab", buffering=0) as progress:
        if not try_lock(progress.fileno()):
            raise ConfigError(f"Another command is writing {file}. Wait until it has ended.")
        table = ClipTable(file, progress)
        table.read_progress(settings)
        yield table


def utterance_id(file: str, start: float) -> str:
    """Return the id of the utterance that starts at a time in seconds of a recording."""
    digest = hashlib.sha256(file.encode()).hexdigest()[:8]
    return f"{Path(file).stem[:MAX_STEM_LENGTH]}-{digest}-{round(1000 * start):09d}"

"""Common Voice manifests: a TSV of clips beside the folder ``clips/``."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sbkit.base.errors import SbkitError

NEEDED_COLUMNS = ("path", "sentence")


@dataclass(frozen=True)
class Clip:
    """One row: ``path`` leads to the audio file, ``id`` is its name without extension.

    ``columns`` holds every other column of the TSV; the speaker is always ``speaker``.
    """

    id: str
    path: Path
    sentence: str
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    """One row that names no clip that can be used; ``id`` is its line in the TSV."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Manifest:
    """The rows of one TSV, in its order."""

    clips: tuple[Clip, ...]
    bad_rows: tuple[BadRow, ...]


def read_manifest(tsv: Path) -> Manifest:
    """Read a Common Voice TSV: tabs, UTF-8, and quotes that mean nothing.

    Raises:
        SbkitError: the file is missing, empty, not UTF-8, without rows or without a needed column.
    """
    rows = list(_read_rows(tsv))
    if not rows:
        raise SbkitError(f"{tsv} must be a Common Voice TSV, but is empty. Replace it.")
    _, header = rows[0]
    missing = [column for column in NEEDED_COLUMNS if column not in header]
    if missing:
        raise SbkitError(
            f"{tsv} must have the columns {', '.join(NEEDED_COLUMNS)}, but has "
            f"{', '.join(header)}. Add {', '.join(missing)}, separated by tabs."
        )
    if len(rows) == 1:
        raise SbkitError(f"{tsv} must list at least one clip, but has only a header. Replace it.")
    return _sort_rows(tsv.parent / "clips", header, rows[1:])


def _read_rows(tsv: Path) -> Iterator[tuple[int, list[str]]]:
    """Give each row that is not blank with its line number; utf-8-sig drops a byte order mark."""
    if not tsv.is_file():
        raise SbkitError(
            f"A manifest must be a TSV file, but {tsv} is missing. Check the data folder."
        )
    try:
        with tsv.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            yield from ((reader.line_num, row) for row in reader if row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise SbkitError(
            f"{tsv} must be tab-separated UTF-8 text, but cannot be read: {error}. Replace it."
        ) from error


def _sort_rows(clips: Path, header: list[str], rows: Iterable[tuple[int, list[str]]]) -> Manifest:
    good: list[Clip] = []
    bad: list[BadRow] = []
    for line, row in rows:
        outcome = _parse_row(clips, header, line, row)
        if isinstance(outcome, Clip):
            good.append(outcome)
        else:
            bad.append(outcome)
    return Manifest(tuple(good), tuple(bad))


def _parse_row(clips: Path, header: list[str], line: int, row: list[str]) -> Clip | BadRow:
    where = f"line {line}"
    if len(row) != len(header):
        return BadRow(where, "wrong number of fields", f"{len(row)} instead of {len(header)}")
    fields = dict(zip(header, row, strict=True))
    name = PurePosixPath(fields["path"].strip())
    if not name.name:
        return BadRow(where, "no path", "the field path is empty")
    if name.is_absolute() or ".." in name.parts:
        return BadRow(where, "path outside the clips folder", str(name))
    if not name.suffix:  # the first releases named clips without their extension
        name = name.with_suffix(".mp3")
    columns = {
        "speaker" if column == "client_id" else column: value
        for column, value in fields.items()
        if column not in NEEDED_COLUMNS
    }
    return Clip(name.stem, clips / name, fields["sentence"], columns)

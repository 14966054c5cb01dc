"""Tables: CSV, TSV and JSON Lines, each row with its number and its fields by name."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from sbkit.audio.io import SUFFIXES
from sbkit.base.errors import SbkitError
from sbkit.base.text import listed
from sbkit.config.document import nearest
from sbkit.data.corpora.manifest import BadRow

PATH_COLUMNS = (
    *("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename"),
    *("file_name", "audio_file"),
)
TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription", "txt")
SHOWN = 30  # columns named in a message
DELIMITERS = "\t,;|"
ROW_WITHIN = rf"(?i)\n[^\n]*(?:{'|'.join(map(re.escape, SUFFIXES))})\b"
BLOCK_BYTES = 1 << 24  # at least the longest row
ROWS_AT_ONCE = 50_000


class TableRow(NamedTuple):
    """One row: its number, 1 for the first line, and its fields by the name of their column."""

    number: int
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The rows of one file, read as they are asked for; what is no row is a bad row.

    columns: their names; rows: can be read once; whole: all rows as texts, where they are there at
    once and none is bad.
    """

    file: Path
    columns: tuple[str, ...]
    rows: Iterable[TableRow | BadRow]
    whole: pa.Table | None = None


def read_table(file: Path) -> Table:
    """Open a table; its content shows its kind: JSON Lines begin with a brace.

    The first line of any other names the columns, and shows the delimiter: a tab, comma, semicolon
    or vertical bar. In a table with tabs quotes are plain characters, as in Common Voice; in others
    they enclose a field, as in CSV.

    Raises:
        SbkitError: the file is missing, empty, not UTF-8, not a table or has no row.
    """
    if not file.is_file():
        state = "is not a file" if file.exists() else "is missing"
        raise SbkitError(f"A manifest must be a file of text, but {file} {state}. Check its path.")
    try:
        with file.open(encoding="utf-8-sig") as stream:
            lines = enumerate(stream, start=1)
            number, first = next((each for each in lines if each[1].strip("\t,;| \n")), (0, ""))
        if not first:
            raise SbkitError(f"{file} must list clips, but is empty. Write one row for each clip.")
        if first.lstrip().startswith("["):
            raise SbkitError(
                f"{file} must be JSON Lines, one object on each line, but is a JSON list. Write "
                "each object on a line of its own, without the brackets and the commas between "
                "them."
            )
        if first.lstrip().startswith("{"):
            return Table(file, column_names(file, _objects_of(file)), _objects_of(file))
        return _read_delimited(file, first.rstrip("\n"), number)
    except UnicodeDecodeError as error:
        raise _wrong_encoding(file, error) from error


def find_column(table: Table, named: str | None, usual: Sequence[str], knob: str) -> str:
    """Return the column that the knob names or, where it is null, the first with a usual name.

    Upper and lower case are the same.

    Raises:
        SbkitError: there is no such column.
    """
    lower = {column.lower(): column for column in table.columns}
    found = next(
        (lower[n.lower()] for n in ([named] if named else usual) if n.lower() in lower), ""
    )
    if found:
        return found
    columns = listed(table.columns, most=SHOWN)
    if named:
        near = nearest(named.lower(), lower)
        raise SbkitError(
            f"`{knob}` must name a column of {table.file}, but {named!r} is not one of {columns}. "
            f"Pass --{knob}={lower[near] if near else 'NAME'} or another of them."
        )
    raise SbkitError(
        f"The first line of {table.file} must name one of the columns {', '.join(usual)}, but "
        f"names {columns}. Name another column with --{knob}, or add the line."
        + " For data without transcripts, pass --text_column=False."
        * (knob == "text_column")
    )


def find_text_column(table: Table, text_column: str | Literal[False] | None) -> str:
    """Return the column of the transcripts, "" where the knob ``text_column`` is False: none.

    Raises:
        SbkitError: there is no such column.
    """
    if text_column is False:
        return ""
    return find_column(table, text_column, TEXT_COLUMNS, "text_column")


def check_no_columns(knobs: Mapping[str, Any], data: str) -> None:
    """Raise SbkitError for knobs that name columns, where the data has none."""
    for key in ("path_column", "text_column"):
        if knobs.get(key):
            raise SbkitError(
                f"`{key}` must be null for {data}, which has no columns, but is {knobs[key]!r}. "
                "Leave it out."
            )


def _wrong_encoding(file: Path, error: Exception) -> SbkitError:
    return SbkitError(
        f"{file} must be UTF-8 text, but is not ({error}). Save it as UTF-8: "
        f"iconv -f LATIN1 -t UTF-8 {file.name} > new.{file.name} (-f UTF-16 where it is that)"
    )


def _read_delimited(file: Path, first: str, number: int) -> Table:
    """Read a table whose header is the line of a number."""
    delimiter = max(DELIMITERS, key=lambda each: (each == "\t" in first, first.count(each)))
    is_quoted = delimiter != "\t"
    (header,) = csv.reader([first], delimiter=delimiter) if is_quoted else [first.split("\t")]
    names = [name.strip() for name in header]
    twice = [name for name, count in Counter(map(str.lower, names)).items() if name and count > 1]
    if twice:
        raise SbkitError(
            f"The first line of {file} must name the columns, each by another name, but "
            f"{twice[0]} comes twice. Rename one of them, or add that line."
        )
    invalid = list[tuple[int, BadRow]]()
    try:
        table = _parse(file, delimiter, len(names), number, invalid, skip=False)
    except pa.ArrowInvalid:  # once more, row by row, to find the rows that are not like the others
        try:
            table = _parse(file, delimiter, len(names), number, invalid, skip=True)
        except pa.ArrowInvalid as error:
            if "UTF8" in str(error):
                raise _wrong_encoding(file, error) from error
            raise SbkitError(
                f"{file} must be a table, but cannot be read ({error}). Correct it."
            ) from error
    table = table.rename_columns([name or f"{place} " for place, name in enumerate(names)])
    table = table.select([name for name in names if name])
    rows = np.arange(number + 1, number + 1 + len(table) + len(invalid))
    if invalid:
        rows = np.setdiff1d(rows, [row for row, _ in invalid])
    bad = [each for _, each in invalid if each.detail]
    if is_quoted:
        table, rows = _without_swallowed_rows(table, rows, bad)
    if not len(table) and not bad:
        raise SbkitError(f"{file} must list at least one clip, but has only a header. Add rows.")
    return Table(
        file,
        tuple(table.column_names),
        chain(bad, _rows_of(table, rows)),
        None if invalid or bad else table,
    )


def _parse(
    file: Path,
    delimiter: str,
    count: int,
    header: int,
    invalid: list[tuple[int, BadRow]],
    *,
    skip: bool,
) -> pa.Table:
    """Read the rows below the header as texts; ``skip`` and note those of other fields.

    Raises:
        pa.ArrowInvalid: it is no table, or has such rows and they are not skipped.
    """

    def note(row: arrow_csv.InvalidRow) -> str:
        fields = f"{row.actual_columns} instead of {row.expected_columns}"
        detail = fields if row.text.strip() else ""  # a line of spaces is no row
        invalid.append((row.number, BadRow(f"row {row.number}", "wrong number of fields", detail)))
        return "skip"

    names = [str(place) for place in range(count)]
    return arrow_csv.read_csv(
        file,
        read_options=arrow_csv.ReadOptions(
            column_names=names,
            skip_rows=header,
            block_size=BLOCK_BYTES,
            use_threads=not skip,
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=delimiter,
            quote_char=False if delimiter == "\t" else '"',
            newlines_in_values=delimiter != "\t",
            invalid_row_handler=note if skip else None,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )


def _without_swallowed_rows(table: pa.Table, rows: Any, bad: list[BadRow]) -> tuple[pa.Table, Any]:
    """Take out rows in which a quote that does not end has made one field of the next rows."""
    swallowed = np.zeros(len(table), np.bool_)
    for column in table.columns:
        swallowed |= pc.match_substring_regex(column, ROW_WITHIN).to_numpy()
    for number, row in zip(rows[swallowed], table.filter(swallowed).to_pylist(), strict=True):
        text = next(value for value in row.values() if "\n" in value)
        bad.append(BadRow(f"row {number}", "quotes around several rows", text[:80]))
    return table.filter(~swallowed), rows[~swallowed]


def _rows_of(table: pa.Table, numbers: Any) -> Iterator[TableRow]:
    for start in range(0, len(table), ROWS_AT_ONCE):
        some = table.slice(start, ROWS_AT_ONCE).to_pylist()
        yield from map(TableRow, numbers[start : start + ROWS_AT_ONCE].tolist(), some)


def column_names(file: Path, rows: Iterable[TableRow | BadRow]) -> tuple[str, ...]:
    """Return the columns that any row has; of JSON Lines, not all rows have all of them.

    Raises:
        SbkitError: no row has one.
    """
    names: dict[str, None] = {}
    fault = "it is empty"
    for row in rows:
        if isinstance(row, TableRow):
            names |= dict.fromkeys(row.fields)
        elif row.id == "row 1":
            fault = row.detail
    if not names:
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but line 1 is none "
            f"({fault}). Correct it."
        )
    return tuple(names)


def _objects_of(file: Path) -> Iterator[TableRow | BadRow]:
    with file.open(encoding="utf-8-sig") as stream:
        yield from read_objects(stream)


def read_objects(lines: Iterable[str]) -> Iterator[TableRow | BadRow]:
    """Read JSON Lines: an object on each line, whose values become texts."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            fields = {name.strip(): _as_text(value) for name, value in values.items()}
            yield TableRow(number, fields)
        except (ValueError, AttributeError) as error:
            yield BadRow(f"row {number}", "not a JSON object", str(error))


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

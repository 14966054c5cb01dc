"""Tables of text: CSV, TSV and JSON Lines, each row with its line and its fields by name."""

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from sbkit.audio.io import SUFFIXES
from sbkit.base.errors import SbkitError
from sbkit.base.files import LONGEST_LINE, unique_keys
from sbkit.base.text import listed
from sbkit.config.document import nearest
from sbkit.data.corpora.manifest import BadRow

PATH_COLUMNS = (
    *("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename"),
    *("file_name", "audio_file"),
)
TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription", "txt")
CHECKED_AT_ONCE = 1 << 24  # bytes
SHOWN = 30  # columns named in a message
MOST_COLUMNS = 1000  # of JSON Lines, where each row may have others
DELIMITERS = "\t,;|"
ROW_WITHIN = re.compile(rf"\n.*(?:{'|'.join(map(re.escape, SUFFIXES))})\b", re.IGNORECASE)
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class TableRow(NamedTuple):
    """One row: the line it ends on, counted from 1, and its fields by the name of their column."""

    line: int
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The rows of one file in its order, read as they are asked for; what is none is a bad row.

    columns: their names; rows: can be read once, and raise SbkitError where the file is no table.
    """

    file: Path
    columns: tuple[str, ...]
    rows: Iterable[TableRow | BadRow]


def read_table(file: Path) -> Table:
    """Open a table whose kind is told by its content: JSON Lines begin with a brace.

    The first line of any other names the columns, and shows the delimiter: a tab, comma, semicolon
    or vertical bar. In a table with tabs quotes are plain characters, as in Common Voice; in others
    they enclose a field, as in CSV.

    Raises:
        SbkitError: the file is missing, empty, not UTF-8, not a table or has no row.
    """
    _check_text(file)
    first = _first_line(file)
    start = first.lstrip()[:1]
    if not start:
        raise _empty(file)
    if start == "[":
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but is a JSON list. Write each "
            "object on a line of its own, without the brackets and the commas between them."
        )
    table = _read_json_lines(file) if start == "{" else _read_delimited(file, first)
    rows = iter(table.rows)
    head = list(islice(rows, 1))
    if not head:
        raise SbkitError(f"{file} must list at least one clip, but has only a header. Add rows.")
    return replace(table, rows=chain(head, rows))


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


def refuse_columns(knobs: Mapping[str, Any], data: str) -> None:
    """Refuse knobs that name columns, for data that has none; raises SbkitError."""
    for key in ("path_column", "text_column"):
        if knobs.get(key):
            raise SbkitError(
                f"`{key}` must be null for {data}, which has no columns, but is {knobs[key]!r}. "
                "Leave it out."
            )


def _check_text(file: Path) -> None:
    """Require a file of UTF-8, which it reads in pieces; raises SbkitError."""
    if not file.is_file():
        state = "is not a file" if file.exists() else "is missing"
        raise SbkitError(f"A manifest must be a file of text, but {file} {state}. Check its path.")
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, start = 1, True
    with file.open("rb") as stream:
        while True:
            content = stream.read(CHECKED_AT_ONCE)
            for mark, name in ENCODINGS.items() if start else ():
                if content.startswith(mark):
                    raise SbkitError(_wrong_encoding(file, f"it is {name}", name))
            start = False
            if b"\0" in content:
                line += content[: content.index(b"\0")].count(b"\n")
                raise SbkitError(
                    f"{file} must be UTF-8 text, but line {line} holds a zero byte. Name a CSV, "
                    "TSV or JSON Lines file, saved as UTF-8."
                )
            try:
                decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                byte = error.object[error.start]
                fault = f"line {line} holds the byte 0x{byte:02X} ({chr(byte)!r} in Latin-1)"
                raise SbkitError(_wrong_encoding(file, fault, "LATIN1")) from error
            if not content:
                return
            line += content.count(b"\n")


def _open_text(file: Path, newline: str) -> TextIO:
    return file.open(encoding="utf-8-sig", newline=newline)


def lines_of(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a text; one of more than LONGEST_LINE comes in parts, as bad rows."""
    return iter(partial(stream.readline, LONGEST_LINE), "")


def _first_line(file: Path) -> str:
    """Return the first line that is not empty, and "" where there is none."""
    with _open_text(file, "") as stream:
        return next((line for line in lines_of(stream) if line.strip()), "")


def _empty(file: Path) -> SbkitError:
    return SbkitError(f"{file} must list clips, but is empty. Write one row for each clip.")


def _wrong_encoding(file: Path, fault: str, name: str) -> str:
    return (
        f"{file} must be UTF-8 text, but {fault}. Save it as UTF-8: "
        f"iconv -f {name} -t UTF-8 {file.name} > new.{file.name}"
    )


def _read_delimited(file: Path, first: str) -> Table:
    delimiter = max(DELIMITERS, key=lambda each: (each == "\t" in first, first.count(each)))
    lines = _split_lines(file, delimiter)
    first_row = next(lines, None)
    if first_row is None:  # nothing but delimiters
        raise _empty(file)
    header = _read_header(file, first_row[1])
    rows = (_read_row(header, line, row) for line, row in lines)
    return Table(file, tuple(name for name in header if name), rows)


def _split_lines(file: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of every line that has any, and its number; raises SbkitError."""
    with _open_text(file, "") as stream:
        if delimiter == "\t":
            reader = csv.reader(lines_of(stream), delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(lines_of(stream), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if any(map(str.strip, row)):
                    yield reader.line_num, row
        except csv.Error as error:
            raise SbkitError(
                f"{file} must be a table, but line {reader.line_num} cannot be read ({error}). "
                "Correct its quotes."
            ) from error


def _read_header(file: Path, row: Sequence[str]) -> list[str]:
    header = [name.strip() for name in row]
    twice = [name for name, count in Counter(map(str.lower, header)).items() if name and count > 1]
    if twice:
        raise SbkitError(
            f"The first line of {file} must name the columns, each by another name, but "
            f"{twice[0]} comes twice. Rename one of them, or add that line."
        )
    while header and not header[-1]:  # a delimiter at the end of the line
        header.pop()
    return header


def _read_row(header: Sequence[str], line: int, row: Sequence[str]) -> TableRow | BadRow:
    """Pair the fields with their columns; empty fields after the last column are no fields."""
    fields = list(row)
    while len(fields) > len(header) and not fields[-1].strip():
        fields.pop()
    if len(fields) != len(header):
        detail = f"{len(fields)} instead of {len(header)}"
        return BadRow(f"line {line}", "wrong number of fields", detail)
    if swallowed := [each for each in fields if "\n" in each and ROW_WITHIN.search(each)]:
        return BadRow(f"line {line}", "quotes around several rows", swallowed[0][:80])
    named = {name: field for name, field in zip(header, fields, strict=True) if name}
    return TableRow(line, named)


def _read_json_lines(file: Path) -> Table:
    return Table(file, column_names(file, _objects_of(file)), _objects_of(file))


def column_names(file: Path, rows: Iterable[TableRow | BadRow]) -> tuple[str, ...]:
    """Return the columns that any row has; raises SbkitError where none has one, or for too many.

    Of JSON Lines, not all rows have all of them.
    """
    names: dict[str, None] = {}
    fault = "it is empty"
    for row in rows:
        if isinstance(row, TableRow):
            names |= dict.fromkeys(row.fields)
        elif row.id == "line 1":
            fault = row.detail
        if len(names) > MOST_COLUMNS:
            raise SbkitError(
                f"The objects of {file} must have at most {MOST_COLUMNS} different keys, but have "
                "more. Write what differs from row to row as a value."
            )
    if not names:
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but line 1 is none "
            f"({fault}). Correct it."
        )
    return tuple(names)


def _objects_of(file: Path) -> Iterator[TableRow | BadRow]:
    with _open_text(file, "\n") as stream:
        yield from read_objects(lines_of(stream))


def read_objects(lines: Iterable[str]) -> Iterator[TableRow | BadRow]:
    """Read JSON Lines: an object on each line, whose values become texts."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, object_pairs_hook=unique_keys)
            yield TableRow(number, _as_fields(values))
        except (ValueError, RecursionError) as error:
            yield BadRow(f"line {number}", "not a JSON object", str(error))


def _as_fields(values: object) -> Mapping[str, str]:
    """Make texts of what an object holds; raises ValueError for what is none, or cannot be kept."""
    if not isinstance(values, dict):
        raise ValueError(f"it is {str(values)[:40]}")
    fields = {name.strip(): _as_text(value) for name, value in values.items()}
    if len(fields) < len(values):
        raise ValueError("a key is there twice")
    whole = "".join(chain(*fields.items()))
    whole.encode()  # half a surrogate pair has no UTF-8
    if "\0" in whole:
        raise ValueError("a text holds a zero byte")
    return fields


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

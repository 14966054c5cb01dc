"""Tables of text: CSV, TSV and JSON Lines, each row with its line and its fields by name."""

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.data.manifest import BadRow

PATH_COLUMNS = ("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename")
TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription", "txt")
SHOWN = 30  # columns named in a message
DELIMITERS = "\t,;|"
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class TableRow:
    """One row: the line it ends on, counted from 1, and its fields by the name of their column."""

    line: int
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The rows of one file in its order; those that are no row of it are bad rows."""

    file: Path
    columns: tuple[str, ...]
    rows: tuple[TableRow | BadRow, ...]


def read_table(file: Path) -> Table:
    """Read a table whose kind is told by its content: JSON Lines begin with a brace.

    The first line of any other names the columns, and shows the delimiter: a tab, comma, semicolon
    or vertical bar. Between tabs, quotes mean nothing (as in Common Voice); else they are CSV's.

    Raises:
        SbkitError: the file is missing, empty, not UTF-8, not a table or has no row.
    """
    text = _read_text(file)
    start = text.lstrip()[:1]
    if not start:
        raise SbkitError(f"{file} must list clips, but is empty. Write one row for each clip.")
    if start == "[":
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but is a JSON list. Write each "
            "object on a line of its own, without the brackets and the commas between them."
        )
    table = _read_json_lines(file, text) if start == "{" else _read_delimited(file, text)
    if not table.rows:
        raise SbkitError(f"{file} must list at least one clip, but has only a header. Add rows.")
    return table


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
    columns = ", ".join(map(printable, table.columns[:SHOWN]))
    if len(table.columns) > SHOWN:
        columns += f" and {len(table.columns) - SHOWN} more"
    if named:
        near = get_close_matches(named.lower(), lower, n=1, cutoff=0)[0]
        raise SbkitError(
            f"`{knob}` must name a column of {table.file}, but {named!r} is not one of {columns}. "
            f"Pass --{knob}={lower[near]}, or the one you mean."
        )
    raise SbkitError(
        f"The first line of {table.file} must name one of the columns {', '.join(usual)}, but "
        f"names {columns}. Name another column with --{knob}, or add the line."
    )


def _read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark."""
    if not file.is_file():
        state = "is not a file" if file.exists() else "is missing"
        raise SbkitError(f"A manifest must be a file of text, but {file} {state}. Check its path.")
    content = file.read_bytes()
    for mark, name in ENCODINGS.items():
        if content.startswith(mark):
            raise SbkitError(_wrong_encoding(file, f"it is {name}", name))
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise SbkitError(
            f"{file} must be UTF-8 text, but line {line} holds a zero byte. Name a CSV, TSV or "
            "JSON Lines file, saved as UTF-8."
        )
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        byte = content[error.start]
        fault = f"line {line} holds the byte 0x{byte:02X} ({chr(byte)!r} in Latin-1)"
        raise SbkitError(_wrong_encoding(file, fault, "LATIN1")) from error


def _wrong_encoding(file: Path, fault: str, name: str) -> str:
    return (
        f"{file} must be UTF-8 text, but {fault}. Save it as UTF-8: "
        f"iconv -f {name} -t UTF-8 {file.name} > new.{file.name}"
    )


def _read_delimited(file: Path, text: str) -> Table:
    first = text.lstrip("\r\n").splitlines()[0]
    delimiter = max(DELIMITERS, key=lambda each: (each == "\t" in first, first.count(each)))
    stream = io.StringIO(text, newline="")
    if delimiter == "\t":
        reader = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise SbkitError(
            f"{file} must be a table, but line {reader.line_num} cannot be read ({error}). "
            "Correct its quotes."
        ) from error
    header = _read_header(file, lines[0][1])
    rows = tuple(_read_row(header, line, row) for line, row in lines[1:])
    return Table(file, tuple(name for name in header if name), rows)


def _read_header(file: Path, row: Sequence[str]) -> list[str]:
    header = [name.strip() for name in row]
    twice = [name for name, count in Counter(map(str.lower, header)).items() if name and count > 1]
    if twice:
        raise SbkitError(
            f"The columns of {file} must have different names, but {twice[0]} comes twice. Rename "
            "one of them."
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
    named = {name: field for name, field in zip(header, fields, strict=True) if name}
    return TableRow(line, named)


def _read_json_lines(file: Path, text: str) -> Table:
    rows = tuple(_read_objects(text))
    names = dict.fromkeys(name for row in rows if isinstance(row, TableRow) for name in row.fields)
    if not names:
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but line 1 is none "
            f"({rows[0].detail if isinstance(rows[0], BadRow) else 'it is empty'}). Correct it."
        )
    return Table(file, tuple(names), rows)


def _read_objects(text: str) -> Iterator[TableRow | BadRow]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRow(f"line {number}", "not a JSON object", str(error))
            continue
        if isinstance(values, dict):
            yield TableRow(
                number, {name.strip(): _as_text(value) for name, value in values.items()}
            )
        else:
            yield BadRow(f"line {number}", "not a JSON object", f"it is {line.strip()[:40]}")


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

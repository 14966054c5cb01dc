"""Tables: CSV, TSV and JSON Lines, as columns of texts."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed
from sbkit.data.manifest import BadRow, Clips, Manifest, open_names

PATH_COLUMNS = (
    *("path", "audio", "audio_filepath", "audio_path", "wav", "file", "filename"),
    *("file_name", "audio_file"),
)
TEXT_COLUMNS = ("sentence", "text", "transcript", "transcription", "txt")
SHOWN = 30  # columns named in a message
DELIMITERS = "\t,;|"
BLOCK_BYTES = 1 << 24  # at least the longest row
ROWS_AT_ONCE = 50_000


@dataclass(frozen=True)
class Table:
    """The rows of one file as texts, null where a row has no such field.

    numbers: of the rows, 1 for the first line; bad_rows: what is no row.
    """

    file: Path
    rows: pa.Table
    numbers: Sequence[int] | npt.NDArray[np.int64]
    bad_rows: Sequence[BadRow] = ()


def join_tables(parts: Iterable[Table], file: Path) -> Table:
    """Return the rows of all parts of a file; in JSON Lines, not all have all columns."""
    read = list(parts)
    rows = [part.rows for part in read if part.rows.column_names]
    return Table(
        file,
        pa.concat_tables(rows, promote_options="default") if rows else pa.table({}),
        np.concatenate([part.numbers for part in read] or [[]]).astype(np.int64),
        [bad for part in read for bad in part.bad_rows],
    )


def read_table(file: Path) -> Table:
    """Read a table; its content shows its kind: JSON Lines begin with a brace.

    The first line of any other names the columns, and shows the delimiter: a tab, comma, semicolon
    or vertical bar. In a table with tabs quotes are plain characters, as in Common Voice; in others
    they enclose a field, as in CSV.

    Raises:
        SbkitError: the file is missing, empty, not UTF-8, not a table or has no row.
    """
    if not file.is_file():
        raise SbkitError(f"A manifest must be a file of text, but {file} is none. Check its path.")
    try:
        with file.open(encoding="utf-8-sig") as lines:
            numbered = enumerate(lines, start=1)
            number, first = next((each for each in numbered if each[1].strip("\t,;| \n")), (0, ""))
            if not first:
                raise SbkitError(
                    f"{file} must list clips, but is empty. Write one row for each clip."
                )
            if first.lstrip()[0] not in "[{":
                return _read_delimited(file, first.rstrip("\n"), number)
            lines.seek(0)
            table = join_tables(read_objects(file, lines), file)
    except UnicodeDecodeError as error:
        raise _wrong_encoding(file, error) from error
    if not table.rows.column_names:
        fault = table.bad_rows[0].detail if table.bad_rows else "it is empty"
        raise SbkitError(
            f"{file} must be JSON Lines, one object on each line, but line 1 is none ({fault}). "
            "Correct it."
        )
    return table


def find_column(table: Table, named: str | None, usual: Sequence[str], knob: str) -> str:
    """Return the column that the knob names or, where it is null, the first with a usual name.

    Upper and lower case are the same.

    Raises:
        SbkitError: there is no such column.
    """
    columns, names = table.rows.column_names, [named] if named else usual
    lower = {column.lower(): column for column in columns}
    found = next((lower[name.lower()] for name in names if name.lower() in lower), "")
    if found:
        return found
    raise SbkitError(
        f"The first line of {table.file} must name one of the columns {', '.join(names)}, but "
        f"names {listed(columns, max_names=SHOWN)}. Name another column with --{knob}, or add "
        "the line."
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
    table, invalid = _parse(file, delimiter, len(names), number)
    bad = [
        BadRow(
            f"row {row.number}",
            "wrong number of fields",
            f"{row.actual_columns} instead of {row.expected_columns}",
        )
        for row in invalid
        if row.text.strip()  # a line of spaces is no row
    ]
    if not len(table) and not bad:
        raise SbkitError(f"{file} must list at least one clip, but has only a header. Add rows.")
    numbers = np.arange(number + 1, number + 1 + len(table) + len(invalid))
    named = table.rename_columns([name or f"{place} " for place, name in enumerate(names)])
    return Table(
        file,
        named.select([name for name in names if name]),
        np.setdiff1d(numbers, [row.number for row in invalid]) if invalid else numbers,
        bad,
    )


def _parse(
    file: Path, delimiter: str, count: int, header: int
) -> tuple[pa.Table, list[arrow_csv.InvalidRow]]:
    """Read the rows below the header as texts, and those of another number of fields."""
    invalid = list[arrow_csv.InvalidRow]()

    def note(row: arrow_csv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    names = [str(place) for place in range(count)]
    read = arrow_csv.ReadOptions(column_names=names, skip_rows=header, block_size=BLOCK_BYTES)
    is_quoted = delimiter != "\t"
    parse = arrow_csv.ParseOptions(
        delimiter=delimiter,
        quote_char='"' if is_quoted else False,
        newlines_in_values=is_quoted,
        invalid_row_handler=note,
    )
    texts = dict.fromkeys(names, pa.string())
    convert = arrow_csv.ConvertOptions(column_types=texts, strings_can_be_null=False)
    try:
        table = arrow_csv.read_csv(file, read, parse, convert)
        if invalid:  # once more: threads give rows no numbers
            invalid.clear()
            read.use_threads = False
            table = arrow_csv.read_csv(file, read, parse, convert)
        return table, invalid
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise _wrong_encoding(file, error) from error
        raise SbkitError(
            f"{file} must be a table, but cannot be read ({error}). Correct it."
        ) from error


def read_objects(file: Path, lines: Iterable[str], at_once: int = ROWS_AT_ONCE) -> Iterator[Table]:
    """Read JSON Lines, some at a time: an object on each line, whose values become texts."""
    numbered = enumerate(lines, start=1)
    while some := list(islice(numbered, at_once)):
        numbers, rows, bad = list[int](), list[dict[str, str]](), list[BadRow]()
        for number, line in some:
            if not line.strip():
                continue
            try:
                values: Any = json.loads(line) or None  # an object without a key is none
                rows.append({name.strip(): _as_text(value) for name, value in values.items()})
                numbers.append(number)
            except (ValueError, AttributeError) as error:
                bad.append(BadRow(f"row {number}", "not a JSON object", str(error)))
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
        yield Table(file, pa.table(columns), numbers, bad)


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ID_COLUMNS = ("id", "utt_id", "utterance_id", "key")

PLAIN = r"^\w[\w-]*(?:[./]\w[\w-]*)*\.\w+$"  # the name of a file below a folder
NOT_STEM = r"^.*/|\.\w+$"  # what such a name has beside its stem

TextColumn = str | Literal[False] | None
Located = str | tuple[str, str]  # a path, or the reason and the detail why there is none


def read_rows(
    table: Table,
    path_column: str | None,
    text_column: TextColumn,
    language: str,
    find: Callable[[str], Located],
    folder: Path | None = None,
) -> Manifest:
    """Make clips of the rows of a table.

    Args:
        table: rows as texts.
        path_column: as `read_manifests` takes it.
        text_column: likewise.
        language: likewise.
        find: returns the file that a name in the column of the paths means.
        folder: in which `find` looks for plain names; a table that has no others is read by whole
            columns, three times as fast. None: `find` is asked for all.

    Raises:
        SbkitError: the table lacks a column.
    """
    path = find_column(table, path_column, PATH_COLUMNS, "path_column")
    text = find_text_column(table, text_column)
    lower = {column.lower(): column for column in table.rows.column_names}
    id = next((lower[name] for name in ID_COLUMNS if name in lower), "")
    rows, bad, own = table.rows, [*table.bad_rows], dict[str, pa.Array]()
    if folder and not id and "offset" not in rows.column_names:
        own = _plain_clips(rows[path].fill_null(""), folder)
    if not own:
        own, rows = _find_clips(table, (path, id, "offset"), find, bad)
    sentences = rows[text].fill_null("") if text else pa.array([""] * len(rows), pa.string())
    columns = {
        new: rows[old] for old, new in open_names(rows.column_names, (path, text, id)).items()
    }
    spoken = columns.get("language", pa.nulls(len(rows), pa.string()))
    columns["language"] = spoken.fill_null(language)
    return Manifest(Clips(pa.table({**own, "sentence": sentences}), pa.table(columns)), tuple(bad))


def _plain_clips(names: pa.ChunkedArray, folder: Path) -> dict[str, pa.Array]:
    """Return the ids and paths of files below a folder, none where a name is not plain."""
    if not pc.all(pc.match_substring_regex(names, PLAIN)).as_py():
        return {}
    base, slash = pa.scalar(os.fsencode(folder), pa.binary()), pa.scalar(b"/", pa.binary())
    paths = pc.binary_join_element_wise(base, names.cast(pa.binary()), slash)
    return {"id": pc.replace_substring_regex(names, NOT_STEM, ""), "path": paths}


def _find_clips(
    table: Table, names: Sequence[str], find: Callable[[str], Located], bad: list[BadRow]
) -> tuple[dict[str, pa.Array], pa.Table]:
    """Return the ids and paths of a table's clips, and their rows; note the ``bad`` ones.

    names: of the columns of the path, the id and the offset.
    """
    kept, ids, paths = list[int](), list[str](), list[bytes]()
    values = (_values(table, column) for column in names)
    for place, (name, utterance, offset) in enumerate(zip(*values, strict=False)):
        file = (
            ("a part of a longer file", f"offset {offset} of {name}")
            if offset.strip(" 0.")  # NeMo's, in seconds: whole files are read
            else find(name.strip())
        )
        if isinstance(file, tuple):
            bad.append(BadRow(f"row {table.numbers[place]}", *file))
            continue
        kept.append(place)
        base = file.rpartition("/")[2]  # a Path takes ten times as long
        ids.append(utterance.strip() or base.rpartition(".")[0] or base)
        paths.append(os.fsencode(file))
    rows = table.rows if len(kept) == len(table.rows) else table.rows.take(pa.array(kept, "int64"))
    return {"id": pa.array(ids, pa.string()), "path": pa.array(paths, pa.binary())}, rows


def _values(table: Table, column: str) -> Iterable[str]:
    """Return the texts of a column, or of none."""
    return (
        table.rows[column].fill_null("").to_pylist()
        if column in table.rows.column_names
        else repeat("")
    )


def locate(folder: Path, name: str) -> Located:
    """Return the path that a name in a manifest means, relative to its folder."""
    name = name.removeprefix("file://")
    if not name:
        return "no path", "the field of the path is empty"
    if "://" in name:
        return "not a file on this machine", name
    if name.startswith("~/"):
        return str(Path(name).expanduser())
    return name if name.startswith("/") else f"{folder}/{name}"

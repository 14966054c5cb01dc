"""Read tables of clips (CSV, TSV, JSON Lines) as columns of text, and turn them into manifests."""

import codecs
import csv
import json
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, TextIO
from unicodedata import normalize

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from sbkit.audio.containers import AudioError
from sbkit.audio.io import SUFFIXES, AudioSpan, declared_seconds, file_rate
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import pointer_sentence
from sbkit.base.messages import listed, note_once
from sbkit.base.units import MICROSECONDS
from sbkit.base.user_folders import expand_home
from sbkit.config.keys import with_defaults
from sbkit.data.columns import (
    CUT_SHORT,
    MAX_ROUNDING_SECONDS,
    TIME_ROLES,
    USUAL_COLUMNS,
    SpanColumns,
    find_columns,
    is_like_time,
    parse_span,
    plain_name,
    units_per_second,
)
from sbkit.data.filesystem import access_errors
from sbkit.data.manifest import (
    BATCH_ROWS,
    Excluded,
    Manifest,
    span_columns,
    span_name,
    text_columns,
    to_texts,
    unreserved_name,
)

MAX_LISTED_COLUMNS = 30  # in an error
# In paths of SpeechBrain's CSV and JSON: the folder of the corpus
DATA_ROOT = re.compile(r"^(\$data_root|\{data_root\})")
DELIMITERS = "\t,;|"  # a table of one column gets the first delimiter
LINE_BREAK = r"\r\n?|\n"
MAX_LINE_BREAKS = 1000  # within a row
RELATIVE_PATH = r"^\w[\w-]*(?:[./]\w[\w-]*)*\.\w+$"  # a simple path of a file below a folder
NOT_STEM = r"^.*/|\.\w+$"  # the folder and the extension of such a path
CLIPS_FOLDER = "clips"  # in a Common Voice release
DEFAULT_SUFFIX = ".mp3"  # its first releases named clips without an extension
MAX_TRIED_SPANS = 50  # of a table, to find out the unit of its times
# Of a span; in a wrong unit, most are shorter or beyond their files. In a unit that is not named,
# more is needed: times within a long recording are short spans of a part of it, as milliseconds.
MIN_HEARD_SECONDS, MIN_UNNAMED_SECONDS = 0.05, 0.3

Units = tuple[int, int, int]  # of a start, a length and an end: how many make a second
SAMPLES: Units = (0, 0, 0)  # of the file
UNIT_NAMES: Mapping[Units, str] = {  # the longest first
    (1, 1, 1): "seconds",
    (1000, 1000, 1000): "milliseconds",
    SAMPLES: "samples",
}

TextRow = dict[str, str]  # the text of each column


@dataclass(frozen=True)
class Table:
    """The rows of one file as columns of text, null where a row lacks a field."""

    file: str  # a path or URL; relative paths are relative to its folder
    rows: pa.Table
    # The line number of each row, from 1; blank lines below a header are not counted.
    lines: npt.NDArray[np.int64] | Sequence[int]
    excluded: Sequence[Excluded] = ()  # lines that are not rows
    # For columns with values that are not texts: the number of the first such row, and the value.
    other_values: Mapping[str, tuple[int, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class TableOptions:
    """Which columns of a table describe clips, as plain values."""

    # By role, such as {"text": "wrd"}; None: no column. Other roles have columns of usual names.
    columns: Mapping[str, str | None] = field(default_factory=dict)
    language: str = ""  # spoken in the clips, "" if unknown; fills the column ``language``
    encoding: str | None = None  # of text; None: UTF-8, or UTF-16 with a byte order mark
    data_root: str | None = None  # the folder that replaces $data_root in paths
    tiers: tuple[str, ...] = ()  # of annotations: names, types or participants

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], language: str = "", source: str | None = None
    ) -> Self:
        """Return the options of a source, which `columns` and `encoding` may name.

        columns: {a.csv: {text: wrd}}; encoding: {a.csv: cp1252}
        """
        settings = with_defaults(settings)
        encoding = settings["encoding"]
        if isinstance(encoding, Mapping):
            if source is None:
                raise ConfigError(
                    "`encoding` names tables, but those of this corpus have one encoding. Write "
                    f"`encoding: {next(iter(encoding.values()), 'cp1252')}`.",
                    keys=("encoding",),
                )
            names = (name for name in encoding if is_named(source, name))
            encoding = encoding.get(next(names, None))
        columns: dict[str, str | None] = {}
        table_columns: dict[str, str | None] = {}
        for name, value in (settings["columns"] or {}).items():
            is_table = isinstance(value, Mapping)
            for role, column in (value if is_table else {name: value}).items():
                if role not in USUAL_COLUMNS or not isinstance(column, str | None):
                    raise ConfigError(
                        f"`columns.{name}` must map {', '.join(USUAL_COLUMNS)} to names of columns,"
                        f" or to null for none, but has {role}: {column}. Write columns: "
                        "{text: wrd}, or columns: {b.csv: {text: wrd}} for one table.",
                        keys=("columns",),
                    )
            if not is_table:
                columns[name] = value
            elif source is None or is_named(source, name):
                table_columns |= value
        named = settings["tier"] or ()
        tiers = (named,) if isinstance(named, str) else tuple(named)
        return cls(columns | table_columns, language, encoding, settings["data_folder"], tiers)

    @property
    def has_text(self) -> bool:
        """Whether transcripts are read."""
        return self.columns.get("text", "") is not None

    def without(self, *roles: str) -> Self:
        """Return options for a table without columns for these roles."""
        return replace(self, columns={**self.columns, **dict.fromkeys(roles)})

    def find(self, names: Sequence[str], role: str, table: object) -> str:
        """Return the column for a role: named in the settings, or with a usual name; "" for none.

        Raises ConfigError if the named column is missing, and DataError if two columns have usual
        names.
        """
        if role in self.columns:
            column = self.columns[role] or ""
            matches = [name for name in names if name.lower() == column.lower()]
            if column and not matches:
                raise ConfigError(
                    f"`columns.{role}` is {column}, but {table} has no such column. It has "
                    f"{listed(names, max_names=MAX_LISTED_COLUMNS)}.",
                    keys=("columns",),
                )
            return matches[0] if column else ""
        usual = find_columns(names, role)
        if len(usual) > 1:
            raise DataError(
                f"{table} has several columns for the {role}: {listed(usual)}. Choose one by "
                f"`columns`, as in columns: {{{role}: {usual[0]}}}.",
                file=f"{table}",
            )
        return usual[0] if usual else ""


def is_named(source: str, key: str) -> bool:
    """Check whether a key names a source: as written, by absolute path, or by its file name."""
    path = os.path.abspath(Path(key).expanduser())  # noqa: PTH100 - Path.absolute keeps ".."
    return key in (source, Path(source).name) or path == os.path.abspath(source)  # noqa: PTH100


def join_tables(tables: Iterable[Table], file: str) -> Table:
    """Join the tables of a file; in JSON Lines, they may have different columns."""
    tables = list(tables)
    rows = [table.rows for table in tables if table.rows.column_names]
    return Table(
        file,
        pa.concat_tables(rows, promote_options="default") if rows else pa.table({}),
        np.concatenate([table.lines for table in tables] or [[]]).astype(np.int64),
        [row for table in tables for row in table.excluded],
        dict(chain.from_iterable(table.other_values.items() for table in reversed(tables))),
    )


def read_table(file: Path | str, encoding: str | None = None) -> Table:
    """Read a whole table; see `read_blocks`."""
    return join_tables(read_blocks(file, encoding), str(file))


def read_blocks(file: Path | str, encoding: str | None = None) -> Iterator[Table]:
    """Yield the rows of a table at a path or URL in blocks; decompress it if its name says so.

    JSON starts with a brace. The first line of other tables names the columns and shows the
    delimiter. With tabs, quotes are plain characters, as in Common Voice.

    encoding: None for UTF-8, or UTF-16 with a byte order mark.
    """
    file = str(file)
    with open_text(file, encoding) as lines:
        numbered = enumerate(lines, start=1)
        nonblank = ((number, line) for number, line in numbered if line.strip("\t,;| \r\n"))
        number, first = next(nonblank, (0, ""))
        if not first:
            raise DataError(f"{file} is empty.", file=file)
        if first.lstrip()[0] not in "[{":
            yield from _DelimitedReader(file, first.rstrip("\r\n"), number).read(lines)
            return
        lines.seek(0)
        rows = _read_document(lines, file)
        lines.seek(0)
        for block in collect_objects(file, rows or _read_objects(lines)):
            if not block.rows.column_names:
                raise DataError(
                    f"{file} looks like JSON Lines, but line 1 is not an object "
                    f"({block.excluded[0].detail}).",
                    file=file,
                    line=1,
                )
            yield block


def read_lines(file: Path | str, encoding: str | None = None) -> Iterator[str]:
    """Yield the lines of a text; decompress it if its name says so. Raises DataError."""
    with open_text(str(file), encoding) as lines:
        yield from lines


@contextmanager
def open_text(file: str, encoding: str | None) -> Iterator[TextIO]:
    """Open a text; raise DataError if it is damaged."""
    is_remote = "://" in file
    if not (is_remote or Path(file).is_file()):
        raise DataError(f"{file} is not a file.", file=file)
    try:
        with access_errors(file) if is_remote else nullcontext():
            encoding = _encoding_of(file, encoding)
            text = fsspec.open(file, "rt", encoding=encoding, compression="infer", newline="")
        with text as lines:
            yield lines
    except UnicodeError as error:
        raise _wrong_encoding(file, encoding) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None):  # the file cannot be reached
            raise
        raise DataError(f"{file} is damaged ({error}). Copy it again.", file=file) from error


def _read_document(lines: TextIO, file: str) -> Iterator[tuple[int, Any]] | None:
    """Return the rows of SpeechBrain's object of objects; None for JSON Lines."""
    nonblank = (line.strip() for line in lines if line.strip())
    first, second = next(nonblank, ""), next(nonblank, "")
    if first.endswith("}") and second.startswith("{"):
        return None
    lines.seek(0)
    with suppress(ValueError):
        document = json.load(lines, object_pairs_hook=partial(_unique_keys, file=file))
        if isinstance(document, dict) and all(isinstance(r, dict) for r in document.values()):
            rows = ({USUAL_COLUMNS["id"][0]: id, **row} for id, row in document.items())
            return enumerate(rows, start=1)
    return None


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move the values of the inner object that describes the audio into the outer object.

    {"wav": {"file": "a.wav", "start": 1}} is SpeechBrain's form of a span of a file.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and plain_name(name) in USUAL_COLUMNS["path"]:
            inner = {key: item for key, item in value.items() if key not in ("array", "bytes")}
            path = inner.pop(TableOptions().find([*inner], "path", name), None)
            flat |= {**inner, name: path}
        else:
            flat[name] = value
    return flat


def _encoding_of(file: str, declared: str | None) -> str:
    """Return the declared encoding, or the encoding of the byte order mark."""
    if pointer := pointer_sentence(file):
        raise DataError(pointer, file=file)
    try:
        if declared and codecs.lookup(declared).name != "utf-8":
            return declared
    except LookupError as error:
        raise ConfigError(f"`encoding`: {error}.", keys=("encoding",)) from error
    with fsspec.open(file, "rb", compression="infer") as content:
        mark = content.read(2)
    return "utf-16" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _wrong_encoding(file: str, encoding: str | None) -> DataError:
    number = 1
    encoding = encoding or "utf-8-sig"
    text = fsspec.open(file, "rt", encoding=encoding, errors="replace", compression="infer")
    with suppress(UnicodeError), text as lines:
        number = next(n for n, line in enumerate(lines, start=1) if "\ufffd" in line)
    return DataError(
        f"{file}: line {number} is not {encoding.removesuffix('-sig')} text. Set another "
        "`encoding`, such as cp1252.",
        file=file,
        line=number,
    )


class _DelimitedReader:
    """A table with a delimiter, whose header is on line ``header_line``."""

    def __init__(self, file: str, header: str, header_line: int) -> None:
        self._file = file
        self._line = header_line + 1  # the first line that is not parsed yet
        self._delimiter = "\t" if "\t" in header else max(DELIMITERS, key=header.count)
        names = header.split(self._delimiter)
        # With tabs, quotation marks are plain characters, unless they enclose all column names.
        self._is_quoted = self._delimiter != "\t" or all(map(re.compile('".*"').fullmatch, names))
        if self._is_quoted:
            names = next(csv.reader([header], delimiter=self._delimiter))
        self._names = [name.strip() for name in names]
        counts = Counter(name.lower() for name in self._names if name)
        if counts.total() > len(counts):
            name = counts.most_common(1)[0][0]
            raise DataError(
                f"The header of {file} has the column {name} twice. If it is a row, add a header.",
                file=file,
                line=header_line,
            )

    def read(self, text: Iterator[str]) -> Iterator[Table]:
        """Yield the rows below the header; exclude rows with the wrong number of fields."""
        has_rows = is_end = False
        lines: list[str] = []
        while not is_end:
            new_lines = [*islice(text, BATCH_ROWS)]
            is_end = len(new_lines) < BATCH_ROWS
            lines += new_lines
            block, lines = self._parse_block(lines, is_end)
            if len(block.rows) or block.excluded:
                has_rows = True
                yield block
        if not has_rows:
            raise DataError(f"{self._file} has a header but no rows.", file=self._file)

    def _parse_block(self, lines: list[str], is_end: bool) -> tuple[Table, list[str]]:
        """Return the rows of lines, and the lines of the last row if it may be unfinished."""
        rows, invalid = self._parse("".join(lines))
        indices = np.delete(np.arange(len(rows) + len(invalid)), [*invalid])
        breaks = np.zeros(len(rows) + len(invalid), int)  # in the fields of each row
        if len(breaks) < len(lines):
            for column in rows.columns:
                breaks[indices] += pc.count_substring_regex(column, LINE_BREAK).to_numpy()
            for index, row in invalid.items():
                breaks[index] = len(re.findall(LINE_BREAK, row.text))
        starts = np.arange(len(breaks)) + np.cumsum(breaks) - breaks
        unfinished = [] if is_end or not self._is_quoted else lines[starts[-1] :]
        if not any('"' in line for line in unfinished) or len(unfinished) > MAX_LINE_BREAKS:
            unfinished = []
        else:
            invalid.pop(len(breaks) - 1, None)
            breaks[-1] = 0
            indices = indices[indices < len(breaks) - 1]
        for index in np.flatnonzero(breaks).tolist():
            if self._joins_rows(lines[starts[index] : starts[index] + breaks[index] + 1]):
                raise self._open_quote(starts[index])
        excluded = []
        for index, row in invalid.items():
            before = lines[starts[index] - 1] if index and not self._is_quoted else ""
            if re.search('\t"[^"\t]*$', before):
                raise self._open_quote(starts[index] - 1)
            if row.text.strip(f"{DELIMITERS} "):
                detail = f"{row.actual_columns} instead of {len(self._names)}"
                id = f"row {self._line + starts[index]}"
                excluded.append(Excluded(id, "wrong number of fields", detail))
        rows = rows.slice(0, len(indices))
        # Blank lines are not rows, and neither are the empty rows of a spreadsheet.
        is_row = pc.greater(reduce(pc.add, map(pc.binary_length, rows.columns)), 0)
        numbers = self._line + starts[indices]
        self._line += len(lines) - len(unfinished)
        table = Table(self._file, rows.filter(is_row), numbers[is_row.to_numpy()], excluded)
        return table, unfinished

    def _joins_rows(self, lines: Sequence[str]) -> bool:
        """Check whether a quotation mark joins rows: it closes badly, or a line resembles a row."""
        try:
            fields = next(csv.reader(lines, delimiter=self._delimiter, strict=True))
        except csv.Error:  # a closing mark within a field, or none
            return True
        joined = (field for field in fields if len(field.splitlines()) > 1)
        parts = re.split(rf"[{self._delimiter}\r\n]", self._delimiter.join(joined))
        first, *next_lines = (line.split(self._delimiter) for line in lines)
        shape = _shape(first[0])
        return any(part.strip(' "').lower().endswith(SUFFIXES) for part in parts) or any(
            len(line) == len(self._names) and _shape(line[0]) == shape and not shape.isalpha()
            for line in next_lines
        )

    def _open_quote(self, index: int) -> DataError:
        line = self._line + index
        return DataError(
            f"{self._file}: line {line} opens a quotation mark that closes on another row, or "
            'never. Double the marks within a field ("").',
            file=self._file,
            line=line,
        )

    def _parse(self, text: str) -> tuple[pa.Table, dict[int, arrow_csv.InvalidRow]]:
        """Return the rows with the right number of fields, and the invalid rows by index."""
        invalid: dict[int, arrow_csv.InvalidRow] = {}

        def skip(row: arrow_csv.InvalidRow) -> str:
            invalid[row.number - 1] = row
            return "skip"

        content = text.encode() or b"\n"
        rows = arrow_csv.read_csv(
            pa.py_buffer(content),
            arrow_csv.ReadOptions(
                column_names=self._names, use_threads=False, block_size=len(content)
            ),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char='"' if self._is_quoted else False,
                newlines_in_values=self._is_quoted,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(self._names, pa.string()),
                include_columns=[name for name in self._names if name],
                strings_can_be_null=False,
            ),
        )
        return rows, invalid


def _shape(name: str) -> str:
    """Return a name with letters as a and digits as 0, such as a0/a for clip7/b."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", name.strip(' "')))


def _read_objects(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Number the objects of JSON Lines, or the errors of invalid lines."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    return ((number, _parse(line)) for number, line in numbered)


def _parse(line: str) -> Any:
    """Return the value of a line, or the error of an invalid one."""
    try:
        return json.loads(line, object_pairs_hook=_unique_keys)
    except (ValueError, DataError) as error:
        return error


def _unique_keys(pairs: Sequence[tuple[str, Any]], file: object = "The line") -> dict[str, Any]:
    """Return an object of JSON; raise DataError if it has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise DataError(f"{file} has the key {key!r} twice.")
    return values


def collect_objects(file: str, numbered: Iterator[tuple[int, Any]]) -> Iterator[Table]:
    """Yield batches of objects, each with its number in the file, as rows of texts."""
    while batch := list(islice(numbered, BATCH_ROWS)):
        rows: dict[int, TextRow] = {}
        excluded: list[Excluded] = []
        other_values: dict[str, tuple[int, object]] = {}
        for number, values in batch:
            if isinstance(values, Excluded):
                excluded.append(replace(values, id=values.id or f"row {number}"))
            elif not isinstance(values, dict) or not values:
                is_error = isinstance(values, Exception)
                detail = str(values) if is_error else "it is not an object with keys"
                excluded.append(Excluded(f"row {number}", "not a JSON object", detail))
            else:
                values = {name.strip(): value for name, value in _flatten(values).items()}
                rows[number] = {name: to_text(value) for name, value in values.items()}
                for name, value in values.items():
                    if not (isinstance(value, str) or is_missing(value)):
                        other_values.setdefault(name, (number, value))
        columns = text_columns([*rows.values()])
        yield Table(file, pa.table(columns), [*rows], excluded, other_values)


def is_missing(value: object) -> bool:
    """Check whether a value is null, or NaN, which pandas writes for null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def to_text(value: object) -> str:
    """Return a value of JSON as text; a missing value as ""."""
    if is_missing(value):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_manifest(
    table: Table,
    options: TableOptions,
    find_audio: Callable[[str], str | Excluded],
    folder: Path | str | None = None,
) -> Manifest:
    """Turn the rows of a table into clips.

    find_audio: returns the file for an entry of the path column, or the reason that there is none.
    folder: where `find_audio` looks for plain relative paths. A table with only such paths is read
        in whole columns, three times as fast. None: `find_audio` is called for each row.
    """
    rows = table.rows
    names = rows.column_names
    path = require_column(table, options, "path")
    text = require_column(table, options, "text") if options.has_text else ""
    id, speaker, language = (
        options.find(names, role, table.file) for role in ("id", "speaker", "language")
    )
    excluded = [*table.excluded]
    clips = dict[str, pa.Array]()
    time_columns, channel = _find_position(table, options)
    if folder and not (id or any(time_columns) or channel):
        files = rows[path].fill_null("")
        if pc.all(pc.match_substring_regex(files, RELATIVE_PATH)).as_py():
            ids = pc.replace_substring_regex(files, NOT_STEM, "")
            clips = {"id": ids, "audio": join_path(folder, files)}
    if not clips:
        clips, rows = _find_clips(table, (path, id, channel), time_columns, find_audio, excluded)
    time_columns = (
        time_columns if time_columns.start else SpanColumns()
    )  # its column also describes the clip
    no_text = pa.nulls(len(rows), pa.string())
    clips["sentence"] = (rows[text] if text else no_text).fill_null("")
    new_names = {speaker: "speaker", language: "language"}
    used = (path, text, id, *time_columns, channel)
    columns = {
        new_names.get(name) or unreserved_name(name): rows[name]
        for name in names
        if name not in used
    }
    if "speaker" in columns:  # if numbers are missing, pandas writes 7 as 7.0
        trimmed = pc.utf8_trim_whitespace(columns["speaker"])
        columns["speaker"] = pc.replace_substring_regex(trimmed, r"^(\d+)\.0$", r"\1")
    tags = columns.get("language", no_text).fill_null("")
    columns["language"] = pc.if_else(pc.equal(tags, ""), options.language, tags)
    return Manifest(pa.table(clips | columns), tuple(excluded))


def require_column(table: Table, options: TableOptions, role: str) -> str:
    """Return the column of a role; raise DataError if it is missing, or a transcript not a text."""
    names: list[str] = table.rows.column_names
    if not names and table.excluded:
        first = table.excluded[0]
        raise DataError(
            f"No row of {table.file} can be used. The first is {first.id}: {first.reason} "
            f"({first.detail}).",
            file=table.file,
        )
    if not names:
        raise DataError(f"{table.file} has no rows.", file=table.file)
    column = options.find(names, role, table.file)
    if not column:
        hint = " Without transcripts, write columns: {text: null}." if role == "text" else ""
        raise DataError(
            f"{table.file} has none of the columns {', '.join(USUAL_COLUMNS[role])}; it has "
            f"{listed(names, max_names=MAX_LISTED_COLUMNS)}. Name one by `columns`, as in columns: "
            f"{{{role}: COLUMN}}, or add a header.{hint}",
            file=table.file,
        )
    if role == "text" and column in table.other_values:
        number, value = table.other_values[column]
        raise DataError(
            f"{table.file}: the {column} of row {number} is {str(value)[:60]!r}, of the type "
            f"{type(value).__name__}, but a transcript is a text. Write it in quotes.",
            file=table.file,
        )
    return column


def join_path(folder: Path | str, names: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the paths of files in a folder, as bytes."""
    base, slash = pa.scalar(os.fsencode(folder), pa.binary()), pa.scalar(b"/", pa.binary())
    return pc.binary_join_element_wise(base, names.cast(pa.binary()), slash)


def _find_position(table: Table, options: TableOptions) -> tuple[SpanColumns, str]:
    """Return the columns of times and of the channel; log unused columns that look like times."""
    names = table.rows.column_names
    time_columns = SpanColumns.choose(
        *(options.find(names, role, table.file) for role in TIME_ROLES)
    )
    times = [] if time_columns.start else [name for name in names if is_like_time(name)]
    if {*times} - {*time_columns}:
        note_once(
            f"note: {table.file}: the columns {listed(times)} are not used. Times are start and "
            "end, or offset and duration, in seconds. Name others by `columns`."
        )
        time_columns = SpanColumns()
    return time_columns, options.find(names, "channel", table.file)


def _find_clips(
    table: Table,
    names: tuple[str, str, str],
    time_columns: SpanColumns,
    find_audio: Callable[[str], str | Excluded],
    excluded: list[Excluded],
) -> tuple[dict[str, pa.Array], pa.Table]:
    """Return the ids and paths of a table's clips, and their rows; append to ``excluded``.

    names: of the columns of the path, the id and the channel; "" for none.
    """
    indices: list[int] = []
    ids: list[str] = []
    paths: list[bytes] = []
    spans: list[AudioSpan] = []
    times = [read_text_column(table.rows, column) for column in time_columns]
    fields = [read_text_column(table.rows, name) for name in names]
    units = _find_units(table, time_columns, times, lambda row: find_audio(fields[0][row].strip()))
    for index, values in enumerate(zip(*fields, zip(*times, strict=True), strict=True)):
        name, id, channel, row_times = values
        span: AudioSpan | Excluded
        file = find_audio(name.strip())
        if isinstance(file, Excluded):
            span = file
        else:
            span = _parse_span(file, row_times, units, channel)
            if isinstance(span, Excluded) and not time_columns.start:
                span = parse_span(file, ("", "", ""), units, channel)  # the length is not a time
        if isinstance(span, Excluded):
            excluded.append(replace(span, id=f"row {table.lines[index]}"))
            continue
        indices.append(index)
        base = name.strip().rpartition("::")[2].rpartition("/")[2]  # faster than Path.name
        ids.append(id.strip() or span_name(base.rpartition(".")[0] or base, span))
        paths.append(os.fsencode(span.path))
        spans.append(span)
        if span.end is not None and not time_columns.start:
            stated = f"`{time_columns.length or time_columns.end}` is {span.end / MICROSECONDS:g} s"
            excluded.append(Excluded(ids[-1], CUT_SHORT, stated))
    is_clip = np.zeros(len(table.rows), bool)
    is_clip[indices] = True
    rows = table.rows.filter(pa.array(is_clip))  # whose texts may have any number of bytes
    clips = {"id": pa.array(ids, pa.string()), "audio": pa.array(paths, pa.binary())}
    if not all(span.is_file for span in spans):
        clips |= span_columns(spans)
    return clips, rows


def _find_units(
    table: Table,
    time_columns: SpanColumns,
    times: Sequence[Sequence[str]],
    file_of: Callable[[int], str | Excluded],
) -> Units:
    """Return the units that most spans of some rows fit their files in: first, those of the names.

    If they fit in several others, the longest counts. Times without a start are not compared. Spans
    as long as their files fit, too: files that were cut out, with the times of the recording.
    """
    first, length, end = (units_per_second(name or time_columns.start) for name in time_columns)
    assumed: Units = (first, length, end)
    numbers = (time.strip() or "0" for time in chain(times[0], times[2]))
    if time_columns.counts_samples and all(map(str.isdecimal, numbers)):
        assumed = SAMPLES
    tried: list[tuple[str, float, Sequence[str]]] = []
    step = -(-len(table.rows) // MAX_TRIED_SPANS) or 1
    for row in range(0, len(table.rows), step) if time_columns.start else ():
        row_times = [column[row].strip() for column in times]
        file = file_of(row)
        if any(row_times) and isinstance(file, str) and (seconds := declared_seconds(file)):
            tried.append((file, seconds, row_times))
    fitting = [
        units
        for units in dict.fromkeys((assumed, *UNIT_NAMES))
        for min_seconds in [MIN_HEARD_SECONDS if units == assumed else MIN_UNNAMED_SECONDS]
        if 2 * sum(_fits(*span, units, min_seconds) for span in tried) > len(tried)
    ]
    units = next(iter(fitting), assumed)
    if units != assumed or units == SAMPLES:
        columns = listed(f"`{column}`" for column in time_columns if column)
        note = f"note: {table.file}: {columns} are read as {UNIT_NAMES.get(units, 'named')}"
        others = [UNIT_NAMES[other] for other in fitting[1:] if other in UNIT_NAMES]
        if units != assumed:
            note += f", because most do not fit the files as {UNIT_NAMES.get(assumed, 'named')}"
        elif others:
            note += f", but would fit the files as {listed(others)}, too"
        note_once(f"{note}.")
    return units


def _fits(
    path: str, seconds: float, times: Sequence[str], units: Units, min_seconds: float
) -> bool:
    """Check whether a span is long enough, and ends about within its file or is as long."""
    span = _parse_span(path, times, units, "")
    if isinstance(span, Excluded):
        return False
    end = seconds if span.end is None else span.end / MICROSECONDS
    length = end - span.start / MICROSECONDS
    is_inside = end <= 1.1 * seconds + MAX_ROUNDING_SECONDS
    is_whole = abs(length - seconds) <= min(MAX_ROUNDING_SECONDS, seconds / 10)
    return (is_inside or is_whole) and round(length, 6) >= min_seconds


def _parse_span(
    path: str, times: Sequence[str], units: Units, channel: str
) -> AudioSpan | Excluded:
    """Parse times, which may be samples of the file."""
    in_samples = units == SAMPLES and any(map(str.strip, times))
    return parse_span(path, times, [_rate_of(path)] * 3 if in_samples else units, channel)


@lru_cache(maxsize=1 << 16)  # many rows are spans of one file
def _rate_of(path: str) -> int:
    with suppress(AudioError):  # the clip is excluded when it is decoded
        return file_rate(path)
    return 1


def read_text_column(rows: pa.Table, name: str) -> list[str]:
    """Return the texts of a column; "" for missing texts, and for all rows without the column."""
    if name not in rows.column_names:
        return [""] * len(rows)
    return to_texts(rows[name].fill_null(""))


def audio_folder(table: Table, path: str) -> Path:
    """Return the folder that the paths of a table start from: its own, or ``clips`` in that folder.

    path: the name of the column. The first row whose file is in either folder decides.
    """
    folder = Path(table.file).parent
    clips = folder / CLIPS_FOLDER
    names = read_text_column(table.rows, path) if clips.is_dir() else ()
    bases = (base for name in names for base in (folder, clips) if _is_clip(base, name))
    return next(bases, folder)


def _is_clip(folder: Path, name: str) -> bool:
    return Path(str(locate_clip(folder, name))).is_file()


def locate_clip(clips: Path, name: str) -> str | Excluded:
    """Return the path of a clip that a release names, below its folder ``clips``."""
    if name.startswith(("/", "~/")) or ".." in name.split("/"):
        return Excluded("", "path outside the clips folder", name)
    if name and "." not in name.rpartition("/")[2]:
        name += DEFAULT_SUFFIX
    return locate(clips, name)


def locate(folder: Path | str, name: str, data_root: str | None = None) -> str | Excluded:
    """Return the path or URL of a file that a table names, or the reason that there is none.

    folder: the folder or URL that relative names start from.
    """
    if not name:
        return Excluded("", "no path", "the field of the path is empty")
    if "://" in str(folder):
        url = name if "://" in name else f"{folder}/{name}"
        if "::" in name or _protocol_of(url) != _protocol_of(str(folder)):
            return Excluded("", "no audio file", f"{name} is not beside {folder}")
        return url
    name = expand_home(name.removeprefix("file://"))
    if root := DATA_ROOT.match(name):
        if data_root is None:
            return Excluded("", f"no {root[0]}", f"{name}: name the folder as `data_folder`")
        name = str(Path(data_root).expanduser().absolute()) + name[root.end() :]
    if "://" in name:
        return Excluded("", "not a file on this machine", name)
    path = name if name.startswith("/") else f"{folder}/{name}"
    if "//" in path or "/./" in path or "/../" in path:  # one file has one path
        plain = os.path.normpath(path)
        path = plain if os.path.realpath(plain) == os.path.realpath(path) else path
    if not (name.isascii() or os.path.lexists(path)):  # macOS writes names in another form
        base, end = path[: -len(name)], path[-len(name) :]
        paths = (base + normalize(form, end) for form in ("NFC", "NFD"))
        path = next(filter(os.path.lexists, paths), path)
    return path


def _protocol_of(url: str) -> str:
    protocol = url.partition("://")[0]
    return "http" if protocol == "https" else protocol

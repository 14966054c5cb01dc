"""Manifests of the user's own: tables, NeMo's JSON Lines, Kaldi's folders, saved datasets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clip
from sbkit.data.corpora.kaldi import is_kaldi, read_kaldi
from sbkit.data.corpora.manifest import (
    BadRow,
    Manifest,
    collect,
    open_columns,
    require_transcripts,
)
from sbkit.data.corpora.saved_dataset import embedded_folder, is_saved_dataset, read_saved_dataset
from sbkit.data.corpora.tables import (
    PATH_COLUMNS,
    Table,
    TableRow,
    find_column,
    find_text_column,
    read_table,
)

ID_COLUMNS = ("id", "utt_id", "utterance_id", "key")


def read_manifests(
    sources: Sequence[Path],
    *,
    path_column: str | None,
    text_column: str | Literal[False] | None,
    language: str,
) -> Manifest:
    """Read files and folders, in their order, as one manifest.

    Args:
        sources: CSV, TSV or JSON Lines, folders of Kaldi, datasets saved to disk, parquet.
        path_column: the column of the audio's path, relative to the manifest; null: a usual name.
        text_column: the column of the transcript; null: a usual name; False: there is none.
        language: of what is spoken, "" where that is not known; the column ``language`` where the
            manifest has none.

    Raises:
        SbkitError: a source cannot be read, lacks a column or has no transcripts.
    """
    rows = chain.from_iterable(
        _read_source(source, path_column, text_column, several=len(sources) > 1)
        for source in sources
    )
    bases = (*map(embedded_folder, sources), sources[0].parent)
    return collect((with_language(row, language) for row in rows), *bases)


def _read_source(
    source: Path,
    path_column: str | None,
    text_column: str | Literal[False] | None,
    *,
    several: bool,
) -> Iterator[Clip | BadRow]:
    if is_kaldi(source):
        rows, column = read_kaldi(source, transcripts=text_column is not False), "text"
    else:
        table = _open_table(source)
        rows = read_rows(table, path_column, text_column)
        column = find_text_column(table, text_column)
    if text_column is not False:
        rows = require_transcripts(rows, source, column)
    return (in_file(row, source.name) for row in rows) if several else rows


def in_file(row: Clip | BadRow, file: str) -> Clip | BadRow:
    """Return a row; a bad one says which file it is from."""
    return replace(row, id=f"{file} {row.id}") if isinstance(row, BadRow) else row


def with_language(row: Clip | BadRow, language: str) -> Clip | BadRow:
    """Return a row with the column ``language``, which it may have already."""
    if isinstance(row, BadRow) or "language" in row.columns:
        return row
    return replace(row, columns={**row.columns, "language": language})


def _open_table(source: Path) -> Table:
    if is_saved_dataset(source):
        return read_saved_dataset(source)
    if source.is_dir():
        raise SbkitError(
            f"A manifest that is a folder must be Kaldi's (wav.scp and text) or a dataset saved by "
            f"datasets.save_to_disk, but {source} is neither. Name a file in it."
        )
    return read_table(source)


def read_rows(
    table: Table, path_column: str | None, text_column: str | Literal[False] | None
) -> Iterator[Clip | BadRow]:
    """Read the clips of a table; raises SbkitError where it lacks a column."""
    lower = {column.lower(): column for column in table.columns}
    path = find_column(table, path_column, PATH_COLUMNS, "path_column")
    text = find_text_column(table, text_column)
    id = next((lower[name] for name in ID_COLUMNS if name in lower), "")
    return (_read_row(row, path, text, id, table.file.parent) for row in table.rows)


def _read_row(
    row: TableRow | BadRow, path_column: str, text_column: str, id_column: str, folder: Path
) -> Clip | BadRow:
    """Read one row; columns that there are not are called ""."""
    if isinstance(row, BadRow):
        return row
    where, fields = f"row {row.number}", row.fields
    name = fields.get(path_column, "").strip().removeprefix("file://")
    if not name:
        return BadRow(where, "no path", f"the field {path_column} is empty")
    if "://" in name:
        return BadRow(where, "not a file on this machine", name)
    if fields.get("offset", "").strip(" 0."):  # NeMo's, in seconds: whole files are read
        return BadRow(where, "a part of a longer file", f"offset {fields['offset']} of {name}")
    path = folder / (Path(name).expanduser() if name.startswith("~/") else name)
    utterance = fields.get(id_column, "").strip() or path.stem
    kept = open_columns(fields, (path_column, text_column, id_column))
    return Clip(utterance, path, fields.get(text_column, ""), kept)

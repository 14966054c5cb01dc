"""Read the sentences of texts for language models: lines, or the transcripts of tables."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsspec.utils import infer_compression

from sbkit.base.messages import plural
from sbkit.data.sources import read_rows
from sbkit.data.tables import (
    TableOptions,
    find_column,
    read_lines,
    read_text_column,
    require_text_column,
)
from sbkit.text.normalization import Orthography
from sbkit.text.transcripts import transcript_normalizer

TABLE_SUFFIXES = {".csv", ".tsv", ".jsonl", ".json", ".parquet"}  # also if compressed

logger = logging.getLogger(__name__)


def read_sentences(
    files: Iterable[Path], table: Orthography, knobs: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the normalized sentences of files: the transcripts of tables, the lines of others.

    table: normalizes them; knobs: with the names of the columns, if they are not usual.
    Raises DataError if a file cannot be read, or a table has no transcripts.
    """
    normalize = transcript_normalizer(table)
    for file in files:
        options = TableOptions.from_knobs(knobs, source=str(file.absolute()))
        is_compressed = infer_compression(file.name) is not None
        suffix = (file.with_suffix("") if is_compressed else file).suffix
        if suffix in TABLE_SUFFIXES:
            lines: Iterable[str] = _read_transcripts(file, options)
        else:
            lines = read_lines(file, options.encoding)
        yield from filter(None, map(normalize, lines))


def _read_transcripts(file: Path, options: TableOptions) -> list[str]:
    table, options = read_rows(file, options)
    if table.excluded:
        rows = plural(len(table.excluded), "row")
        logger.info(f"{file}: {rows} left out, {table.excluded[0].reason}")
    # The column of the manifests, if the table has it, too.
    declared = options.text_column or ""
    column = find_column(table.rows.column_names, declared, ()) if declared else None
    return read_text_column(table, require_text_column(table, column))

"""Read the sentences of texts for language models: lines, or the transcripts of tables."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsspec.utils import infer_compression

from sbkit.base.errors import DataError
from sbkit.base.messages import plural
from sbkit.data.audio_tables import read_texts
from sbkit.data.columns import find_columns
from sbkit.data.read_manifests import ARROW_SUFFIXES, find_files
from sbkit.data.tables import (
    TableOptions,
    read_lines,
    read_table,
    read_text_column,
    require_column,
)
from sbkit.text.normalization import Orthography
from sbkit.text.transcripts import transcript_normalizer

TABLE_SUFFIXES = {".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json", *ARROW_SUFFIXES}
MAX_COMPARED_LINES = 100

logger = logging.getLogger(__name__)


def read_sentences(
    files: Iterable[Path], table: Orthography, settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the normalized sentences of files: the transcripts of tables, the lines of others."""
    normalize = transcript_normalizer(table)
    for file in files:
        options = TableOptions.from_settings(settings, source=str(file.absolute()))
        if _is_table(file, options.encoding):
            lines: Iterable[str] = _read_transcripts(file, options)
        else:
            _check_no_ids(file, options.encoding)
            lines = read_lines(file, options.encoding)
        yield from filter(None, map(normalize, lines))


def _is_table(file: Path, encoding: str | None) -> bool:
    is_compressed = infer_compression(file.name) is not None
    suffix = (file.with_suffix("") if is_compressed else file).suffix.lower()
    if suffix in TABLE_SUFFIXES or file.is_dir():
        return True
    first = next(read_lines(file, encoding), "")
    columns = first.strip().split("\t" if "\t" in first else ",")
    has_other = find_columns(columns, "path") or find_columns(columns, "id")
    return first.startswith('{"') or bool(find_columns(columns, "text") and has_other)


def _check_no_ids(file: Path, encoding: str | None) -> None:
    """Raise DataError if lines begin with ids: distinct words with digits, as in Kaldi's `text`."""
    lines = islice(filter(str.strip, read_lines(file, encoding)), MAX_COMPARED_LINES)
    words = [line.split(maxsplit=1)[0] for line in lines]
    if len({*words}) == len(words) > 2 and all(re.search(r"\d", word) for word in words):
        raise DataError(
            f"{file}: each line has an id, such as {words[0]}, which would be learned. Take them "
            f"out: awk '{{$1=\"\"}}1' {file} > sentences.txt"
        )


def _read_transcripts(source: Path, options: TableOptions) -> Iterator[str]:
    for file in find_files(str(source)):
        if file.path.endswith(ARROW_SUFFIXES):
            table = read_texts(file.path, options)
        else:
            table = read_table(file.path, options.encoding)
        if table.excluded:
            rows = plural(len(table.excluded), "row")
            logger.info(f"{file.path}: {rows} left out, {table.excluded[0].reason}")
        # The column of the manifests, if the table has it, too.
        text = options.columns.get("text") or ""
        has_it = text.lower() in map(str.lower, table.rows.column_names)
        columns = {"text": text} if has_it else {}
        text = require_column(table, replace(options, columns=columns), "text")
        yield from read_text_column(table.rows, text)

"""Read sentences for language models: the lines of texts, or the transcripts of tables."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sbkit.base.errors import DataError
from sbkit.base.messages import plural
from sbkit.data.annotations import read_table_or_annotations
from sbkit.data.audio_tables import read_text_rows
from sbkit.data.read_manifests import ARROW_SUFFIXES, TABLE_PATTERN, find_files
from sbkit.data.tables import (
    TableOptions,
    read_lines,
    read_text_column,
    require_column,
)
from sbkit.text.normalization import TextTable
from sbkit.text.transcripts import transcript_normalizer

MAX_COMPARED_LINES = 100

logger = logging.getLogger(__name__)


def read_sentences(
    files: Iterable[Path], table: TextTable, settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the normalized sentences of files: transcripts of tables, and lines of other files."""
    normalize = transcript_normalizer(table)
    for file in files:
        options = TableOptions.from_settings(settings, source=str(file.absolute()))
        is_table = file.is_dir() or TABLE_PATTERN.search(file.name.lower())
        lines = (_read_transcripts if is_table else _read_text)(file, options)
        yield from filter(None, map(normalize, lines))


def _read_text(file: Path, options: TableOptions) -> Iterator[str]:
    """Yield lines; raise DataError if they begin with ids.

    Ids are distinct words with digits, as in Kaldi's `text`.
    """
    nonblank = filter(str.strip, read_lines(file, options.encoding))
    words = [line.split(maxsplit=1)[0] for line in islice(nonblank, MAX_COMPARED_LINES)]
    if len({*words}) == len(words) > 2 and all(re.search(r"\d", word) for word in words):
        raise DataError(
            f"{file}: each line begins with an id, such as {words[0]}, which the language model "
            f"would learn. Remove the ids: awk '{{$1=\"\"}}1' {file} > sentences.txt"
        )
    yield from read_lines(file, options.encoding)


def _read_transcripts(source: Path, options: TableOptions) -> Iterator[str]:
    for file in find_files(str(source)):
        if file.path.endswith(ARROW_SUFFIXES):
            table = read_text_rows(file.path, options)
        else:
            table = read_table_or_annotations(file.path, options)
        if table.excluded:
            rows = plural(len(table.excluded), "row")
            logger.info(f"{file.path}: {rows} left out, {table.excluded[0].reason}")
        if options.columns.get("text") not in table.rows.column_names:  # a column of the manifests
            options = replace(options, columns={})
        yield from read_text_column(table.rows, require_column(table, options, "text"))

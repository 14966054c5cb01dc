"""Parquet files, in which a few bytes may stand for a million equal rows."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import ClassLabel, Features

MOST_TIMES = 100  # the bytes of the file: tables of speech have less than ten
ROWS_AT_ONCE = 100  # in memory, with the audio that they hold
MOST_AT_ONCE = 1 << 30  # bytes that so many rows may come to
LEAST_LIMIT = 1 << 24  # bytes that are always allowed


class ParquetFile:
    """A file, by its path or its bytes, of which no more is read than could have been written.

    Attributes:
        schema: its columns.
    """

    def __init__(self, source: Any, *, size: int) -> None:
        """Open it; ``size`` is in bytes. Raises pyarrow.ArrowException or OSError for damage."""
        self._file, self._most = pq.ParquetFile(source), max(LEAST_LIMIT, MOST_TIMES * size)
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield some rows at a time; raises ValueError for more than the file can mean."""
        about, total = self._file.metadata, 0
        groups = map(about.row_group, range(about.num_row_groups))
        unpacked = max(map(_unpacked, groups), default=0)
        self._require_likely(unpacked)
        # Each row may have again what is stored once: 100 rows of 13 kB came to 7 GB.
        at_once = max(1, min(ROWS_AT_ONCE, MOST_AT_ONCE // max(1, unpacked)))
        for batch in self._file.iter_batches(at_once):
            total += batch.nbytes
            self._require_likely(total)
            yield with_class_names(batch)

    def _require_likely(self, unpacked: int) -> None:
        if unpacked > self._most:
            raise ValueError(f"it unpacks to more than {self._most} bytes")


def _unpacked(group: Any) -> int:
    """Return how many bytes a group of rows has at least: of equal values only one is stored."""
    columns = map(group.column, range(group.num_columns))
    return max(int(group.total_byte_size), sum(int(each.num_values) for each in columns))


def with_class_names(rows: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Return rows in which the numbers of `datasets.ClassLabel` are names, "" for -1, no class."""
    if b"huggingface" not in (rows.schema.metadata or {}):
        return rows
    for place, (name, kind) in enumerate(Features.from_arrow_schema(rows.schema).items()):
        if isinstance(kind, ClassLabel):
            known = pc.if_else(pc.greater_equal(rows[name], 0), rows[name], None)
            rows = rows.set_column(place, name, pc.take(pa.array(kind.names), known))
    return rows

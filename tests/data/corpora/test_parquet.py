"""Of a small file no more is unpacked than it can mean, and not much of it at once."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sbkit.data.corpora import parquet
from sbkit.data.corpora.parquet import ParquetFile

MEGABYTE = 1 << 20


def opened(table: dict[str, Any]) -> ParquetFile:
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink, store_schema=False, compression="zstd")
    return ParquetFile(sink, size=sink.tell())


@pytest.mark.parametrize(
    "table",
    [
        {"text": ["x" * (17 * MEGABYTE)]},
        {"text": pa.DictionaryArray.from_arrays([0] * 9, ["x" * (17 * MEGABYTE)])},
        {"text": pa.array([np.zeros(17 * MEGABYTE, np.int8)], pa.list_(pa.int8()))},
    ],
    ids=["a value", "a value of many rows", "a list"],
)
def test_a_bomb_is_refused_before_a_row_of_it_is_unpacked(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pq.ParquetFile, "iter_batches")
    with pytest.raises(ValueError, match="unpacks to more than 16777216 bytes"):
        next(opened(table).batches())


def test_rows_that_share_a_large_value_are_read_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "MOST_AT_ONCE", 10 * MEGABYTE)
    noise = np.random.default_rng(0).bytes(MEGABYTE)
    file = opened({"audio": pa.DictionaryArray.from_arrays([0] * 40, [noise])})
    assert [len(batch) for batch in file.batches()] == [9, 9, 9, 9, 4]

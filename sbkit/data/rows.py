"""Rows of a corpus that Python holds: kept as a table that `manifest` names.

    rows -> parquet in the cache, named by its content

A stored table is read like every other table, so there is no second reader.
"""

import hashlib
import io
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from sbkit.base.errors import DataError
from sbkit.base.kept import keep
from sbkit.base.messages import short_value
from sbkit.data.columns import PATH_COLUMNS, find_columns
from sbkit.data.sources import BATCH_ROWS, name_classes, to_file
from sbkit.data.tables import is_missing

FOLDER, TABLE = "rows", "rows.parquet"  # in the cache
CONTENTS = frozenset({"array", "bytes", "path"})  # of audio, as `datasets` gives it


def store_rows(rows: Any) -> Path:
    """Store rows with the columns of a table, and return the file.

    rows: mappings in any iterable, a pandas DataFrame or a dataset of `datasets`. Audio is a path,
        or anything else that `stream_source` takes. Paths are relative to the working folder.

    >>> clip = {"array": [0.0] * 800, "sampling_rate": 16_000}
    >>> store_rows([{"audio": clip, "text": "nothing"}]).suffix
    '.parquet'
    """
    stored = [_to_stored(record) for record in _to_records(rows)]
    # Not Table.from_pylist, which drops the columns that the first row lacks
    names = dict.fromkeys(name for row in stored for name in row)
    if not names:
        raise DataError("There are no rows.")
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in stored])
        except pa.ArrowException as error:
            raise DataError(f"The column {name} cannot be stored in a table: {error}") from error
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    content = buffer.getvalue()

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / TABLE).write_bytes(content)

    made_from = {"content": hashlib.sha256(content).hexdigest()}
    return keep(FOLDER, made_from, write, by_code=False) / TABLE


def _to_records(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        for name, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Audio):
                rows = rows.cast_column(name, datasets.Audio(decode=False))
        if not (isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom"):
            tables = map(name_classes, rows.with_format("arrow").iter(BATCH_ROWS))
            rows = chain.from_iterable(table.to_pylist() for table in tables)
    elif hasattr(rows, "iterrows"):  # a DataFrame
        rows = rows.to_dict("records")
    records = [*rows] if isinstance(rows, Iterable) else [rows]
    for record in records:
        if not isinstance(record, Mapping):
            raise DataError(
                "Rows must be mappings, a DataFrame or a datasets.Dataset, but one is "
                f"{short_value(record)}."
            )
    return records


def _to_stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose arrays are WAV files, and whose paths are absolute."""
    path_columns = find_columns([*map(str, record)], None, PATH_COLUMNS)
    stored: dict[str, Any] = {}
    for column, value in record.items():
        name = str(column)
        is_audio = name in path_columns or hasattr(value, "get_all_samples")
        if isinstance(value, Mapping) and not CONTENTS.isdisjoint(value):
            is_audio = True
            if all(value.get(key) is None for key in CONTENTS):
                value = None
        if is_missing(value):
            stored[name] = None
        else:
            stored[name] = to_file(value) if is_audio else value
    return stored

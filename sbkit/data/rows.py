"""Rows of a corpus that Python holds: kept as a table that `manifest` names.

    mappings, a DataFrame or a `datasets.Dataset` -> parquet in the cache, named by its content

A stored table is read like every other table, so there is no second reader.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from sbkit.audio.io import to_rate, to_samples
from sbkit.base.errors import DataError
from sbkit.base.files import write_bytes_atomically
from sbkit.data.cache import default_cache
from sbkit.data.columns import PATH_COLUMNS, find_columns
from sbkit.data.sources import name_classes
from sbkit.data.tables import is_missing

FOLDER = "rows"  # in the cache


def store_rows(rows: Any) -> Path:
    """Store rows with the columns of a table, and return the file.

    rows: mappings, a pandas DataFrame or a `datasets.Dataset`. Audio is a path, as in a table, or
        `{"array": samples, "sampling_rate": Hz}` as `datasets` gives it. Paths are relative to the
        working folder.

    Raises:
        DataError: the rows are of another type, or an array lacks its rate.

    >>> clip = {"array": [0.0] * 800, "sampling_rate": 16_000}
    >>> store_rows([{"audio": clip, "text": "nothing"}]).suffix
    '.parquet'
    """
    stored = [_to_stored(record) for record in _to_records(rows)]
    # Not Table.from_pylist, which drops the columns that the first row lacks
    names = dict.fromkeys(name for row in stored for name in row)
    try:
        table = pa.table({name: [row.get(name) for row in stored] for name in names})
    except pa.ArrowException as error:
        raise DataError(f"The rows cannot be stored as a table: {error}") from error
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:16]
    file = default_cache() / FOLDER / f"{digest}.parquet"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(file, buffer.getvalue())
    return file


def _to_records(rows: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(rows, datasets.Dataset):
        for name, feature in rows.features.items():
            if isinstance(feature, datasets.Audio):
                rows = rows.cast_column(name, datasets.Audio(decode=False))
        records: Sequence[Mapping[str, Any]] = name_classes(
            rows.with_format("arrow")[:]
        ).to_pylist()
        return records
    if hasattr(rows, "to_dict"):  # a DataFrame
        rows = rows.to_dict("records")
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(
            "Rows must be mappings from columns to values, a DataFrame or a datasets.Dataset, but "
            f"are a {type(rows).__name__}."
        )
    return rows


def _to_stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose arrays are WAV files, and whose paths are absolute."""
    path_columns = find_columns([*map(str, record)], None, PATH_COLUMNS)
    stored: dict[str, Any] = {}
    for column, value in record.items():
        name = str(column)
        if isinstance(value, Mapping) and value.get("path") and value.get("bytes") is None:
            value = value["path"]  # audio of `datasets` that is a file
        if isinstance(value, Mapping) and value.get("array") is not None:
            rate = value.get("sampling_rate")
            if rate is None:
                raise DataError(f"The column {name} has an `array` without its `sampling_rate`.")
            wav = io.BytesIO()
            soundfile.write(wav, to_samples(value["array"]), to_rate(rate), format="WAV")
            stored[name] = {"bytes": wav.getvalue(), "path": None}
        elif name in path_columns and isinstance(value, str | Path):
            stored[name] = str(value) if "://" in str(value) else str(Path(value).absolute())
        else:
            stored[name] = None if is_missing(value) else value
    return stored

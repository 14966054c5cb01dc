"""Datasets saved by ``datasets.save_to_disk`` and parquet files, with their audio or its paths."""

from pathlib import Path

import datasets

from sbkit.base.errors import SbkitError
from sbkit.data.embedded_audio import write_embedded
from sbkit.data.tables import Table, TableRow

MARKS = ("state.json", "dataset_dict.json")


def is_saved_dataset(source: Path) -> bool:
    """Check for what ``save_to_disk`` writes, or a parquet file."""
    return source.suffix == ".parquet" or any((source / mark).is_file() for mark in MARKS)


def read_saved_dataset(source: Path) -> Table:
    """Return the rows as a table, without decoding audio; an audio column becomes its path.

    Audio that the dataset holds itself is written to files in the cache.

    Raises:
        SbkitError: it cannot be read, or has several splits.
    """
    if (source / "dataset_dict.json").is_file():
        names = sorted(each.name for each in source.iterdir() if each.is_dir())
        raise SbkitError(
            f"A manifest must be one split, but {source} holds {', '.join(names)}. Name one of "
            f"them, as {source / names[0] if names else source}."
        )
    try:
        read = datasets.Dataset.from_parquet if source.is_file() else datasets.load_from_disk
        dataset = read(str(source))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SbkitError(
            f"{source} must be a dataset that `datasets` reads, but fails ({error}). Save it again."
        ) from error
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Audio):
            dataset = dataset.cast_column(name, datasets.Audio(decode=False))
    rows = tuple(
        TableRow(number, {name: _as_text(source, value) for name, value in row.items()})
        for number, row in enumerate(dataset, start=1)
    )
    return Table(source / "data", tuple(dataset.column_names), rows)


def _as_text(source: Path, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict) and "path" in value and "bytes" in value:
        path = str(value["path"] or "")
        content = value["bytes"]
        return str(write_embedded(content, path, source)) if content is not None else path
    return str(value)

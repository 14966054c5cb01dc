"""Choose the rows of a run by the values of their columns: the key ``where``.

where: {variant: pt-BR, gender: [female_feminine, ""]}    "" stands for rows without a value
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pyarrow.compute as pc

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import listed
from sbkit.data.manifest import PART_COLUMNS, Manifest

MAX_LISTED_VALUES = 8  # in an error
_SEPARATOR = r"\s*[,|]\s*"  # between the values of a field, such as several accents

Where = Mapping[str, Sequence[str]]  # the values to keep, by column


def parse_where(where: object) -> Where:
    """Return the values of each column in the key ``where``; raises ConfigError.

    >>> parse_where({"variant": "pt-BR", "up_votes": [2, 3]})
    {'variant': ('pt-BR',), 'up_votes': ('2', '3')}
    """
    if not isinstance(where, Mapping | None):
        raise ConfigError(
            f"`where` must map columns to values, but is {where!r}. Write where: {{variant: "
            "pt-BR}, or pass --where 'variant=pt-BR'."
        )
    values_by_column: dict[str, tuple[str, ...]] = {}
    for column, value in (where or {}).items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(item, str | int | float) for item in values):
            raise ConfigError(
                f"`where.{column}` must be a value or a list of values, but is {value!r}. Write "
                f"'\"\"' for rows without a value."
            )
        values_by_column[str(column)] = tuple(map(str, values))
    return values_by_column


def filter_rows(manifest: Manifest, where: Where, split: str) -> Manifest:
    """Keep the rows with one of the values in each column, and count the others.

    A field may hold several values, separated by commas or vertical bars.

    Raises:
        ConfigError: the manifest has no such column.
        DataError: no row is left.
    """
    for column, values in where.items():
        names = [name for name in manifest.rows.column_names if name not in PART_COLUMNS]
        if column not in names:
            raise ConfigError(
                f"`where` names the column {column}, but {split} has no such column. It has "
                f"{', '.join(names)}."
            )
        fields = manifest.rows[column].fill_null("")
        masks = [
            pc.match_substring_regex(fields, rf"^(.*{_SEPARATOR})?{re.escape(value)}({_SEPARATOR}.*)?$")
            if value
            else pc.equal(fields, "")
            for value in values
        ]
        rows = np.flatnonzero(reduce(pc.or_, masks).to_numpy())
        condition = f"{column}={' or '.join(values)}"
        if not len(rows):
            counts = sorted(fields.value_counts().to_pylist(), key=lambda entry: -entry["counts"])
            present = (f"{entry['values'] or '(empty)'} ({entry['counts']:,})" for entry in counts)
            raise DataError(
                f"`where` asks for {condition}, but none of the {len(manifest):,} rows of {split} "
                f"has it. There are {listed(present, max_names=MAX_LISTED_VALUES)}."
            )
        if num_filtered := len(manifest) - len(rows):
            filtered = {**manifest.filtered, f"not {condition} (`where`)": num_filtered}
            manifest = replace(manifest.take(rows), filtered=filtered)
    return manifest

"""Choose the rows of a run by the values of their columns.

where: {variant: pt-BR, gender: [female_feminine, ""]}    "" stands for rows without a value
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import reduce
from operator import or_

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.arrays import Bools
from sbkit.base.errors import ConfigError, DataError, concerning
from sbkit.base.messages import listed
from sbkit.data.manifest import SPAN_COLUMNS, Manifest

MAX_LISTED_VALUES = 8  # in an error
_SEPARATOR = r"\s*[,|]\s*"  # between the values of a field, such as several accents
_NUMBER = re.compile(
    r"-?(0|[1-9]\d*|(?=\.\d))(\.\d*)?([eE][+-]?\d{1,3})?", re.ASCII
)  # 01 is a name


def filter_splits(
    blocks_by_split: Mapping[str, Iterable[Manifest]], where: Mapping[str, object]
) -> dict[str, list[Manifest]]:
    """Keep the rows of all splits that the key ``where`` chooses."""
    manifests = {split: Manifest.join(blocks) for split, blocks in blocks_by_split.items()}
    return {split: [*filter_rows(rows, where, split).blocks()] for split, rows in manifests.items()}


@concerning("where")
def filter_rows(manifest: Manifest, where: Mapping[str, object], split: str) -> Manifest:
    """Keep the rows with one of the values in each column, and count the others.

    A field may hold several values, separated by commas or vertical bars.
    """
    for column, value in where.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(item, str | int | float) for item in values):
            raise ConfigError(
                f"`where.{column}` must be a value or a list of values, but is {value!r}."
            )
        names = [name for name in manifest.rows.column_names if name not in SPAN_COLUMNS]
        if column not in names:
            raise ConfigError(
                f"`where` names the column {column}, but {split} has only {', '.join(names)}."
            )
        fields = manifest.rows[column].fill_null("")
        is_chosen = reduce(or_, (_has_value(fields, str(item)) for item in values))
        choices = " or ".join(str(item) or "(empty)" for item in values)
        if not is_chosen.any():
            counts = sorted(fields.value_counts().to_pylist(), key=lambda entry: -entry["counts"])
            present = (f"{entry['values'] or '(empty)'} ({entry['counts']:,})" for entry in counts)
            raise DataError(
                f"`where` keeps rows whose {column} is {choices}, but {split} has none of them. It "
                f"has {listed(present, max_names=MAX_LISTED_VALUES)}."
            )
        if num_filtered := int((~is_chosen).sum()):
            filtered = {**manifest.filtered, f"{column} is not {choices}": num_filtered}
            manifest = replace(manifest.filter(is_chosen), filtered=filtered)
    return manifest


def _has_value(fields: pa.ChunkedArray, value: str) -> Bools:
    """Return which fields have a value: a text, or a number or truth value in any spelling.

    JSON has true and 1.0 where pandas writes True and 1 into a CSV.
    """
    flags = "(?i)" if value.lower() in ("true", "false") else ""
    pattern = rf"{flags}^(.*{_SEPARATOR})?{re.escape(value)}({_SEPARATOR}.*)?$" if value else "^$"
    mask = pc.match_substring_regex(fields, pattern)
    if _NUMBER.fullmatch(value):
        equal = [field for field in pc.unique(fields).to_pylist() if _has_number(field, value)]
        mask = pc.or_(mask, pc.is_in(fields, value_set=pa.array(equal, pa.string())))
    chosen: Bools = mask.to_numpy()
    return chosen


def _has_number(field: str, value: str) -> bool:
    numbers = filter(_NUMBER.fullmatch, re.split(_SEPARATOR, field.strip()))
    return Decimal(value) in map(Decimal, numbers)

"""Choose the rows of a run by the values of their columns.

where: {variant: pt-BR, gender: [female_feminine, ""]}    "" stands for rows without a value
skip_quality_tags: [short-audio]                          of Common Voice's Spontaneous Speech
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.arrays import Bools
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import listed
from sbkit.data.manifest import PART_COLUMNS, Manifest

MAX_LISTED_VALUES = 8  # in an error
_SEPARATOR = r"\s*[,|]\s*"  # between the values of a field, such as several accents

QUALITY_COLUMN = "quality_tags"  # tags, separated by vertical bars
QUALITY_TAGS = (  # those that release 5.0 of Spontaneous Speech documents
    *("short-audio", "long-audio", "transcription-length", "speech-rate", "non-allowed-script"),
    *("mixed-script-words", "mixed-script-transcription", "dataset-language-audio-mismatch"),
)

Where = Mapping[str, Sequence[str]]  # the values to keep, by column


def parse_where(where: Mapping[str, object] | None) -> Where:
    """Return the values of each column in the key ``where``.

    >>> parse_where({"variant": "pt-BR", "up_votes": [2, 3]})
    {'variant': ('pt-BR',), 'up_votes': ('2', '3')}
    """
    values_by_column: dict[str, tuple[str, ...]] = {}
    for column, value in (where or {}).items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(item, str | int | float) for item in values):
            raise ConfigError(
                f"`where.{column}` must be a value or a list of values, but is {value!r}."
            )
        values_by_column[str(column)] = tuple(map(str, values))
    return values_by_column


def filter_manifests(
    manifests: Mapping[str, Manifest], settings: Mapping[str, Any]
) -> dict[str, Manifest]:
    """Apply the keys ``where`` and ``skip_quality_tags`` to the manifests of all splits."""
    where = parse_where(settings.get("where"))
    chosen = {split: filter_rows(manifest, where, split) for split, manifest in manifests.items()}
    return skip_rows(chosen, settings.get("skip_quality_tags") or ())


def filter_rows(manifest: Manifest, where: Where, split: str) -> Manifest:
    """Keep the rows with one of the values in each column, and count the others.

    A field may hold several values, separated by commas or vertical bars.
    """
    for column, values in where.items():
        names = [name for name in manifest.rows.column_names if name not in PART_COLUMNS]
        if column not in names:
            raise ConfigError(
                f"`where` names the column {column}, but {split} has only {', '.join(names)}."
            )
        fields = manifest.rows[column].fill_null("")
        is_chosen = reduce(or_, (_has_value(fields, value) for value in values))
        choices = " or ".join(value or "(empty)" for value in values)
        if not is_chosen.any():
            counts = sorted(fields.value_counts().to_pylist(), key=lambda entry: -entry["counts"])
            present = (f"{entry['values'] or '(empty)'} ({entry['counts']:,})" for entry in counts)
            raise DataError(
                f"`where` keeps rows whose {column} is {choices}, but {split} has none. There are "
                f"{listed(present, max_names=MAX_LISTED_VALUES)}."
            )
        if num_filtered := int((~is_chosen).sum()):
            filtered = {**manifest.filtered, f"{column} is not {choices}": num_filtered}
            manifest = replace(manifest.filter(is_chosen), filtered=filtered)
    return manifest


def _has_value(fields: pa.ChunkedArray, value: str) -> Bools:
    pattern = rf"^(.*{_SEPARATOR})?{re.escape(value)}({_SEPARATOR}.*)?$" if value else "^$"
    mask: Bools = pc.match_substring_regex(fields, pattern).to_numpy()
    return mask


def skip_rows(manifests: Mapping[str, Manifest], tags: Sequence[str]) -> dict[str, Manifest]:
    """Leave out the rows with one of the quality tags from the manifests of all splits.

    A row with several such tags counts for the first of them.
    """
    tagged = [split for split in manifests if QUALITY_COLUMN in manifests[split].rows.column_names]
    if tags and not tagged:
        raise ConfigError(
            f"`skip_quality_tags` needs a column {QUALITY_COLUMN}, but no split has one."
        )
    used = dict(manifests)
    for tag in tags:
        num_skipped = 0
        for split in tagged:
            manifest = used[split]
            is_skipped = _has_value(manifest.rows[QUALITY_COLUMN].fill_null(""), tag)
            if count := int(is_skipped.sum()):
                filtered = {**manifest.filtered, f"quality tag {tag}": count}
                used[split] = replace(manifest.filter(~is_skipped), filtered=filtered)
            num_skipped += count
        if not num_skipped and tag not in QUALITY_TAGS:
            raise ConfigError(
                f"`skip_quality_tags` names {tag!r}, which no row has. Choose among "
                f"{', '.join(QUALITY_TAGS)}."
            )
    return used

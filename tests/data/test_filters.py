"""Rows are chosen by the values of their columns, and the others are counted."""

from pathlib import Path

import pandas as pd
import pytest

from sbkit.base.errors import SbkitError
from sbkit.config.overrides import parse_overrides
from sbkit.data.filters import filter_rows
from sbkit.data.manifest import Clip, Manifest
from tests.data.test_spans import read

ACCENTS = ("Scottish", "India (India, Nepal),Scottish", "", "Scottish English", "Irish|Welsh")
MANIFEST = Manifest.of(
    Clip(id, Path(f"/{id}.wav"), "", {"accents": accent})
    for id, accent in zip("abcde", ACCENTS, strict=True)
)
CONDITIONS = [  # ids of the rows that are kept, and counts of the others
    (["accents=Scottish"], "ab", {"accents is not Scottish": 3}),
    (["accents=India (India, Nepal)"], "b", {"accents is not India (India, Nepal)": 4}),
    (["accents="], "c", {"accents is not (empty)": 4}),
    (["accents=", "accents=Welsh"], "ce", {"accents is not (empty) or Welsh": 3}),
    (["accents=Scottish", "id=b"], "b", {"accents is not Scottish": 3, "id is not b": 1}),
]


@pytest.mark.parametrize(("conditions", "ids", "filtered"), CONDITIONS)
def test_where_keeps_rows_with_a_value(
    conditions: list[str], ids: str, filtered: dict[str, int]
) -> None:
    where = parse_overrides([f"--where={condition}" for condition in conditions])["where"]
    manifest = filter_rows(MANIFEST, where, "train")
    assert (manifest.ids, manifest.filtered) == ([*ids], filtered)


# Each value of a row in JSON and parquet, and in the CSV of pandas
TYPES: list[tuple[object, str]] = [(True, "True"), (False, "False"), (1.0, "1"), (2, "2.0")]
TYPES += [(1e16, "10000000000000000"), (0.5, ".5"), ("01", "01"), ("a, 1", "a, 1"), (None, "")]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        *((True, {0}), ("TRUE", {0}), (False, {1}), (1, {2, 7}), ("1.00", {2, 7}), ("2", {3})),
        *((10**16, {4}), (0.5, {5}), ("5e-1", {5}), ("01", {6}), ("a", {7}), ("", {8})),
    ],
)
def test_values_are_compared_whatever_type_they_have_in_the_table(
    value: object, rows: set[int], tmp_path: Path
) -> None:
    """JSON's true and 1.0 were texts that no value of a YAML equals."""
    json_values, texts = zip(*TYPES, strict=True)
    for index, json_value in enumerate(json_values):
        table = pd.DataFrame({"path": [f"{index}.wav"], "text": "hi", "value": [json_value]})
        table.to_parquet(tmp_path / f"{index}.parquet")
        table.to_json(tmp_path / f"{index}.jsonl", orient="records", lines=True)
    names = [f"{index}.wav" for index in range(len(texts))]
    pd.DataFrame({"path": names, "text": "hi", "value": texts}).to_csv(tmp_path / "a.csv")
    for pattern in ("*.parquet", "*.jsonl", "a.csv"):
        manifest = Manifest.join(map(read, sorted(tmp_path.glob(pattern))))
        kept = filter_rows(manifest, {"value": value}, "train")
        assert {int(id) for id in kept.ids} == rows, pattern


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"accent": "Welsh"}, "names the column accent, but dev has only .*accents"),
        ({"accents": "welsh"}, r"is welsh, but .* It has Scottish \(1\), .*\(empty\) \(1\)"),
        ({"accents": []}, r"`where.accents` must .*, but is"),
        ({"accents": {"a": 1}}, r"`where.accents` must .*, but is"),
    ],
)
def test_where_refuses_what_no_row_can_have(where: dict[str, object], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        filter_rows(MANIFEST, where, "dev")

"""Rows are chosen by the values of their columns, and the others are counted."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.config.overrides import parse_overrides
from sbkit.data.filters import filter_rows
from sbkit.data.manifest import Clip, Manifest

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

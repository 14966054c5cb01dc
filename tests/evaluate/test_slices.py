"""A test set's metrics for each value of a column."""

from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.batch import user_columns
from sbkit.evaluate.slices import length_group, measure_slices, require_columns, write_slices

COLUMNS = {"speaker": ["ann", "bob", "ann", ""], "language": ["en", "en", "fr", "fr"]}


def mean(results: Any) -> dict[str, float]:
    return {"mean": sum(results) / len(results)}


def test_slices_measure_each_value_of_each_column(tmp_path: Path) -> None:
    slices = measure_slices(COLUMNS, [1, 2, 3, 6], mean)
    assert slices == {
        "speaker": {
            "(empty)": {"utterances": 1, "mean": 6.0},
            "ann": {"utterances": 2, "mean": 2.0},
            "bob": {"utterances": 1, "mean": 2.0},
        },
        "language": {"en": {"utterances": 2, "mean": 1.5}, "fr": {"utterances": 2, "mean": 4.5}},
    }
    interval = {"low": 0.4, "high": None, "unit": "clip"}
    names = ("ann", "=cmd|' /C calc'!A0", "a\x1b[2Jb")  # a formula, and a cleared screen
    figures = {"WER": 0.5, "WER_interval": interval}
    write_slices(tmp_path / "by.tsv", {"speaker": dict.fromkeys(names, figures)})
    head, row, *hostile = (tmp_path / "by.tsv").read_text().splitlines()
    assert head.split("\t") == ["column", "value", "WER", "WER_low", "WER_high"]
    assert row.split("\t") == ["speaker", "ann", "0.5", "0.4", ""]
    assert [row.split("\t")[1] for row in hostile] == ["'=cmd|' /C calc'!A0", r"a\x1b[2Jb"]


def test_lengths_are_grouped() -> None:
    groups = ["00 to 02 s", "00 to 02 s", "02 to 05 s", "05 to 10 s", "20 s or more"]
    assert [*map(length_group, (0, 1.99, 2, 6.25, 20))] == groups


def test_require_columns_refuses_a_missing_column() -> None:
    names = {"a": ["accent", "speaker", "audio"], "b": ["speaker", "audio"]}
    columns = {name: user_columns(its_names) for name, its_names in names.items()}
    require_columns(["speaker", "length"], columns)
    with pytest.raises(SbkitError, match="`accent`, but b has no such column. It has speaker, len"):
        require_columns(["accent"], columns)

"""The classes of a training set are two or more."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.vocabulary import ensure_labels


@pytest.mark.parametrize(("names", "words"), [(["en"] * 3, "is en"), ([], "is missing")])
def test_one_class_is_refused_and_nothing_is_written(
    names: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SbkitError, match=f"two classes or more, but every label in it {words}"):
        ensure_labels(tmp_path / "labels.txt", names)
    assert not (tmp_path / "labels.txt").exists()
    assert ensure_labels(tmp_path / "labels.txt", ["b", "a", "b"]).names == ["a", "b"]


def test_what_differs_is_named_also_among_many(tmp_path: Path) -> None:
    many = [f"speaker {number}" for number in range(100)]
    ensure_labels(tmp_path / "labels.txt", many)
    with pytest.raises(SbkitError, match="lists, but differ in speaker 99, zoe. Ch"):
        ensure_labels(tmp_path / "labels.txt", [*many[:99], "zoe"])

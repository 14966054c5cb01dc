"""Ids outside of the vocabulary are refused before a kernel reads them."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.vocabulary import ClassLabels, Vocabulary, ensure_labels

INVALID = [
    ({"size": 3}, "from 0 to 2"),  # eos is 3
    ({"size": 9, "unk": 0}, "'unk': 0"),  # the id of the blank
    ({"size": 9, "blank": -1}, "'blank': -1"),  # sentencepiece's default: no padding
]


@pytest.mark.parametrize(("ids", "text"), INVALID)
def test_special_ids_must_differ_and_lie_inside(ids: dict[str, int], text: str) -> None:
    with pytest.raises(SbkitError, match=f"four different ids .*{text}"):
        Vocabulary(**ids)


@pytest.mark.parametrize("label", [-1, 0, 10, 1 << 40])
def test_target_out_of_bounds_or_blank_is_refused(label: int) -> None:
    with pytest.raises(SbkitError, match=f"from 0 to 9 and .* clip7 holds {label}\\."):
        Vocabulary(size=10).check_targets([4, label, 5], clip="clip7")


@pytest.mark.parametrize(("names", "text"), [(["en"] * 3, "is en"), ([], "is missing")])
def test_fewer_than_two_classes_and_empty_ones_are_refused_and_nothing_is_written(
    names: list[str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(SbkitError, match=f"two classes or more, but every label in it {text}"):
        ensure_labels(tmp_path / "labels.txt", names)
    with pytest.raises(SbkitError, match="Some rows of the training set have no label"):
        ensure_labels(tmp_path / "labels.txt", ["en", "", "fr"])
    assert not (tmp_path / "labels.txt").exists()
    assert ensure_labels(tmp_path / "labels.txt", ["b", "a", "b"]).names == ["a", "b"]


@pytest.mark.parametrize("content", [b"en\n", b"en\nen\n", b"en\n\n"])
def test_label_file_without_two_different_names_is_refused(content: bytes) -> None:
    with pytest.raises(SbkitError, match="must list two or more different classes"):
        ClassLabels(file="labels.txt", content=content)


def test_other_classes_in_run_folder_are_named(tmp_path: Path) -> None:
    speakers = [f"speaker {number}" for number in range(100)]
    ensure_labels(tmp_path / "labels.txt", speakers)
    with pytest.raises(SbkitError, match="labels.txt differ in speaker 99, zoe. Ch"):
        ensure_labels(tmp_path / "labels.txt", [*speakers[:99], "zoe"])

"""Rows are chosen by the values of their columns, and the others are counted."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.config.overrides import parse_overrides
from sbkit.data.filters import filter_rows, parse_where, skip_rows
from sbkit.data.manifest import Clip, Manifest

ACCENTS = ("Scottish", "India (India, Nepal),Scottish", "", "Scottish English", "Irish|Welsh")
TAGS = ("", "short-audio", "short-audio|speech-rate", "speech-rate", "new-tag")


def make_manifest() -> Manifest:
    rows = zip("abcde", ACCENTS, TAGS, strict=True)
    return Manifest.of(
        Clip(id, Path(f"/{id}.wav"), "", {"accents": accent, "quality_tags": tags})
        for id, accent, tags in rows
    )


CONDITIONS = {
    "accents=Scottish": "ab",
    "accents=India (India, Nepal)": "b",
    "accents=Welsh": "e",
    "accents=": "c",
    "id=d": "d",
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_where_keeps_rows_with_a_value(condition: str) -> None:
    where = parse_where(parse_overrides(["--where", condition])["where"])
    manifest = filter_rows(make_manifest(), where, "train")
    assert manifest.ids == list(CONDITIONS[condition])
    assert sum(manifest.filtered.values()) == 5 - len(manifest)


def test_where_takes_several_values_and_columns() -> None:
    options = ["--where", "accents=", "--where=accents=Welsh", "--where", "id=e"]
    manifest = filter_rows(make_manifest(), parse_where(parse_overrides(options)["where"]), "dev")
    assert manifest.ids == ["e"]
    assert manifest.filtered == {"accents is not (empty) or Welsh": 3, "id is not e": 1}


def test_where_refuses_what_no_row_can_have() -> None:
    with pytest.raises(SbkitError, match="names the column accent, but dev has only .*accents"):
        filter_rows(make_manifest(), parse_where({"accent": "Welsh"}), "dev")
    with pytest.raises(
        SbkitError, match=r"accents is welsh, but .* There are Scottish \(1\), .*\(empty\) \(1\)"
    ):
        filter_rows(make_manifest(), parse_where({"accents": "welsh"}), "dev")
    for value in ([], {"a": 1}):
        with pytest.raises(SbkitError, match=r"`where.accents` must .*, but is"):
            parse_where({"accents": value})


def test_quality_tags_are_skipped_and_counted_by_name() -> None:
    manifests = {"train": make_manifest(), "dev": Manifest.of([Clip("x", Path("/x.wav"), "")])}
    used = skip_rows(manifests, ["short-audio", "speech-rate", "long-audio", "new-tag"])
    assert used["train"].ids == ["a"]
    counts = {"quality tag short-audio": 2, "quality tag speech-rate": 1, "quality tag new-tag": 1}
    assert used["train"].filtered == counts
    assert used["dev"].ids == ["x"]
    with pytest.raises(SbkitError, match="names 'shrot-audio', which no row has. Choose among sho"):
        skip_rows(manifests, ["shrot-audio"])
    with pytest.raises(SbkitError, match="needs a column quality_tags"):
        skip_rows({"dev": manifests["dev"]}, ["short-audio"])

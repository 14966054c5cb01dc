"""The matched-pair sentence-segment word error test, beside NIST's sc_stats."""

import csv
from pathlib import Path

import pytest

from sbkit.evaluate.intervals import mapsswe, segment_differences

DATA = Path(__file__).parent / "data" / "mapsswe"
SENTENCES = (Path(__file__).parents[1] / "lm/data/sentences.txt").read_text().splitlines()


def table(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.tsv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


@pytest.mark.parametrize("printed", table("sc_stats"), ids=lambda printed: printed["pair"])
def test_it_says_what_sc_stats_says(printed: dict[str, str]) -> None:
    triples = [(row["reference"], row["a"], row["b"]) for row in table(printed["pair"])]
    found = mapsswe(triples)
    assert found["segments"] == int(printed["segments"])
    assert f"{found['mean']:.3f}" == printed["mean"]
    assert f"{found['z']:.3f}" == printed["Z"]
    swapped = mapsswe((reference, b, a) for reference, a, b in triples)
    assert (-swapped["z"], swapped["p"]) == pytest.approx((found["z"], found["p"]))


@pytest.mark.parametrize(
    ("reference", "a", "b", "differences"),
    [
        ("a b c d", "a b c d", "a b c d", []),
        ("a b c d", "x b c d", "a b c y", [1, -1]),  # two words apart: two segments
        ("a b c", "x b c", "a b y", [0]),  # one word apart: one segment
        ("a b c d e f", "x b z c d e f", "a b c d y f", [2, -1]),
        ("a b c d", "x b z c d", "a b c y", [1]),  # an insertion starts the count of words again
        ("a b", "a b", "a b x y", [-2]),
        ("a b", "", "a b", [2]),
        ("  a \t b ", "a b", "a  c", [-1]),  # any white space is one
    ],
)
def test_segments_are_cut_at_two_words_that_both_have(
    reference: str, a: str, b: str, differences: list[int]
) -> None:
    assert segment_differences(reference, a, b) == differences


def test_what_cannot_be_tested_has_a_reason() -> None:
    same = mapsswe([("a b", "a b", "a b")] * 9)
    assert (same["segments"], same["z"], same["p"]) == (0, None, None)
    assert "at least 2 segments with errors, but there are 0" in same["reason"]
    alike = mapsswe([("a b", "a c", "a b")] * 9)
    assert (alike["segments"], alike["mean"], alike["p"]) == (9, 1.0, None)
    assert "all 9 have the same difference, +1" in alike["reason"]
    equal = mapsswe([("a b", "a c", "a d")] * 9)  # the same number of errors everywhere
    assert (equal["segments"], equal["z"], equal["p"]) == (9, 0.0, 1.0)

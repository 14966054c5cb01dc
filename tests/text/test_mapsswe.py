"""The matched-pairs test gives the figures of NIST's sc_stats."""

import random
from pathlib import Path

import pytest

from sbkit.text.mapsswe import matched_pairs

SENTENCES = (Path(__file__).parents[1] / "lm/data/sentences.txt").read_text().splitlines()


def mishear(seed: int, rate: float) -> list[str]:
    """Change, drop or double some words of every sentence."""
    draw = random.Random(seed)
    heard = []
    for sentence in SENTENCES:
        words = []
        for word in sentence.split():
            kind = draw.random() / rate
            words += [word] if kind > 1 else [[f"{word}s"], [], [word, "uh"]][int(kind * 3)]
        heard.append(" ".join(words))
    return heard


# Printed by sclite and sc_stats of Debian's sctk 2.4.10 (`-t mapsswe -v`) for these texts:
# seeds and rates of both; segments, mean and Z.
@pytest.mark.parametrize(
    ("one", "other", "segments", "mean", "z"),
    [
        ((1, 0.1), (2, 0.25), 60, -0.717, -4.062),
        ((3, 0.3), (4, 0.3), 71, -0.099, -0.546),
        ((5, 0.05), (6, 0.15), 44, -0.818, -4.651),
        ((7, 0.5), (8, 0.4), 67, 0.522, 2.74),
    ],
)
def test_the_figures_are_those_of_sc_stats(
    one: tuple[int, float], other: tuple[int, float], segments: int, mean: float, z: float
) -> None:
    found = matched_pairs(SENTENCES, mishear(*one), mishear(*other))
    assert found.z is not None
    assert found.p is not None
    assert (found.segments, round(found.mean, 3), round(found.z, 3)) == (segments, mean, z)
    assert (found.p < 0.05) == (abs(z) > 1.96)


def test_equal_recognizers_are_alike() -> None:
    heard = mishear(1, 0.3)
    found = matched_pairs(SENTENCES, heard, heard)
    assert (found.mean, found.z, found.p) == (0, None, None)
    assert matched_pairs(SENTENCES, SENTENCES, SENTENCES).segments == 0
    assert matched_pairs([], [], []).segments == 0


def test_two_good_words_end_a_segment() -> None:
    """In "a b c d e f g" the errors at a and at g are apart, those at a and c are not."""
    found = matched_pairs(["a b c d e f g"], ["x b c d e f x"], ["a b c d e f g"])
    assert found.segments == 2
    assert matched_pairs(["a b c d e f g"], ["x b x d e f g"], ["a b c d e f g"]).segments == 1

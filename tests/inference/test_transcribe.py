"""Long audio is cut where it is quiet, and no sample is lost."""

import numpy as np
import pytest

from sbkit.base.units import SAMPLE_RATE
from sbkit.inference.pieces import LONGEST_PIECE, SHORTEST_PIECE, cut_at_quiet


@pytest.mark.parametrize("seconds", [0.0, 0.1, 29.9, 30.0, 30.1, 61.0, 200.3])
def test_pieces_join_to_the_whole_and_none_is_too_long(seconds: float) -> None:
    samples = np.random.default_rng(0).integers(-9000, 9000, round(seconds * SAMPLE_RATE))
    pieces = cut_at_quiet(samples.astype(np.int16))
    assert np.array_equal(np.concatenate(pieces), samples)
    assert all(len(piece) <= LONGEST_PIECE * SAMPLE_RATE for piece in pieces)
    assert all(len(piece) >= SHORTEST_PIECE * SAMPLE_RATE for piece in pieces[:-1])


def test_the_cut_is_in_the_pause() -> None:
    samples = np.full(40 * SAMPLE_RATE, 5000, np.int16)
    pause = slice(24 * SAMPLE_RATE, 24 * SAMPLE_RATE + SAMPLE_RATE // 2)
    samples[pause] = 3
    first, _ = cut_at_quiet(samples)
    assert pause.start < len(first) < pause.stop

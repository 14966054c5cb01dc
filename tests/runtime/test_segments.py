"""Long audio is cut in pauses, and no sample is lost, however it comes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from sbkit.audio.io import Samples
from sbkit.runtime.segments import (
    MAX_SEGMENT_SECONDS,
    OVERLAP_SECONDS,
    Segment,
    Segmenter,
    find_gap,
)
from sbkit.runtime.voice_detector import VoiceDetector
from tests.runtime.told_frames import ToldFrames, is_speech, tell

RATE = 16_000


def noise(seconds: float, level: int = 3000) -> Samples:
    count = round(seconds * RATE)
    return np.random.default_rng(0).integers(-level, level + 1, count).astype(np.int16)


def cut(*parts: Samples, block: float = 60.0, multiple: int = 640) -> list[Segment]:
    audio, size = np.concatenate(parts), round(block * RATE)
    blocks = [audio[start : start + size] for start in range(0, len(audio), size)]
    return list(Segmenter(RATE, multiple).split(blocks))


@pytest.mark.parametrize("seconds", [0.0, 0.1, 29.9, 30.0, 30.1, 61.0, 200.3])
@pytest.mark.parametrize("level", [0, 3000])
def test_pieces_join_to_the_whole_and_none_is_too_long(seconds: float, level: int) -> None:
    audio = noise(seconds, level)
    pieces = cut(audio)
    assert all(len(piece.samples) <= MAX_SEGMENT_SECONDS * RATE for piece in pieces)
    assert [piece.start for piece in pieces[1:]] == [piece.next_start for piece in pieces[:-1]]
    assert [piece.overlap > 0 for piece in pieces] == [level > 0] * (len(pieces) - 1) + [False]
    unique = [piece.samples[: piece.next_start - piece.start] for piece in pieces]
    assert np.array_equal(np.concatenate(unique), audio)


def test_without_a_pause_two_pieces_share_whole_frames() -> None:
    pieces = cut(noise(100))
    assert len(pieces) == len([*Segmenter(RATE).split([noise(100)])]) == 4
    for one, two in pairwise(pieces):
        assert (two.start - one.start) % 640 == 0
        assert one.overlap / RATE == pytest.approx(OVERLAP_SECONDS, abs=0.1)
        assert np.array_equal(one.samples[-one.overlap :], two.samples[: one.overlap])


def test_a_piece_holds_all_that_it_shares_with_the_one_before() -> None:
    """What is a pause beside loud speech was none beside what came before it."""
    quiet, click = noise(26.3, 100), noise(0.2, 20_000)
    one, two, *_ = cut(quiet, click, noise(1.5, 100), click, noise(1.8, 100), noise(40, 20_000))
    assert 0 < one.overlap < len(two.samples)


def test_a_long_pause_ends_a_sentence_and_a_short_one_only_a_long_piece() -> None:
    words, breath, pause = noise(4), noise(0.3, 10), noise(0.8, 10)
    short = cut(words, breath, words, pause, words)
    assert [round(len(segment.samples) / RATE, 1) for segment in short] == [8.7, 4.4]
    first, _ = cut(words, noise(3, 10), words)
    assert len(first.samples) / RATE == pytest.approx(4 + 3 - 0.5, abs=0.05)
    long = cut(*[words, breath] * 10)
    assert all(segment.overlap == 0 for segment in long)
    assert len(long) <= 6
    edges = [segment.next_start / RATE % 4.3 for segment in long[:-1]]
    assert edges == pytest.approx([4.15] * len(edges), abs=0.15)


def test_a_short_piece_waits_for_more() -> None:
    first, second = cut(noise(0.4), noise(0.8, 10), noise(3), noise(0.8, 10), noise(3))
    assert len(first.samples) > 4 * RATE
    assert second.overlap == 0


@pytest.mark.parametrize("block", [0.01, 1.0, 7.3, 100.0])
def test_the_size_of_blocks_changes_nothing(block: float) -> None:
    parts = [noise(13), noise(0.6, 10), noise(40), noise(0.3, 10), noise(5)]
    pieces, expected = cut(*parts, block=block), cut(*parts)
    assert [(piece.start, len(piece.samples), piece.overlap) for piece in pieces] == [
        (segment.start, len(segment.samples), segment.overlap) for segment in expected
    ]


def test_noise_that_is_not_far_below_speech_is_a_pause_still() -> None:
    (first, _) = cut(noise(5, 3000), noise(1, 300), noise(5, 3000))  # 20 dB
    assert len(first.samples) / RATE == pytest.approx(5.5, abs=0.1)


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        (range(30, 34), 32),
        ([*range(24, 28), 30, 31, *range(33, 37)], 34),  # the gap goes on past the middle half
        ([*range(24, 30), *range(33, 36)], 34),
        (range(24, 40), 32),
    ],
)
def test_an_overlap_is_cut_in_the_longest_gap_of_its_middle_half(
    silent: Sequence[int], expected: int
) -> None:
    """The last 16 of 40 frames are shared, and 28 to 35 are the middle half of these."""
    log_probs = np.full((40, 3), -5.0)
    log_probs[:, 2] = 0.0
    log_probs[[*silent], 0] = 1.0
    assert find_gap(log_probs, 16, {0, 1}) == expected


@pytest.mark.parametrize("block", [0.01, 0.7, 7.3, 100.0])
def test_a_detector_finds_the_pauses_that_loudness_does_not_tell(block: float) -> None:
    runs = [(seconds, 0.3 + 0.6 * spoken) for seconds, spoken in is_speech(0.5, 4, 1, 5, 0.1, 9, 2)]
    audio, size = tell(*runs), round(block * RATE)
    blocks = [audio[start : start + size] for start in range(0, len(audio), size)]
    cutter = Segmenter(RATE, 640, detector=VoiceDetector(ToldFrames()))
    assert [len(segment.samples) / RATE for segment in cutter.split(blocks)] == [5.0, 16.6]
    assert len(list(Segmenter(RATE, 640).split(blocks))) == 1

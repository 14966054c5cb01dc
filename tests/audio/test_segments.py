"""Long audio is cut in pauses without losing a sample, whatever the size of its blocks."""

from itertools import pairwise

import numpy as np
import pytest

from sbkit.audio.io import Samples
from sbkit.audio.segments import (
    MAX_SEGMENT_SECONDS,
    OVERLAP_SECONDS,
    Pauses,
    Segment,
    Segmenter,
    find_gap,
    tail_samples,
)
from sbkit.bundle.protocols import Encoded
from sbkit.tasks.asr.bundle import encode_in_segments
from sbkit.tasks.vad.predict import VoiceDetector
from tests.runtime.scripted_speech import ScriptedSpeech, is_speech, script

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
def test_segments_cover_the_audio_and_none_is_too_long(seconds: float, level: int) -> None:
    audio = noise(seconds, level)
    segments = cut(audio)
    assert all(len(segment.samples) <= MAX_SEGMENT_SECONDS * RATE for segment in segments)
    assert all(after.start == segment.next_start for segment, after in pairwise(segments))
    *overlaps, last = [segment.overlap > 0 for segment in segments]
    assert overlaps == [level > 0] * len(overlaps) and not last
    assert {round(segment.overlap / RATE) for segment in segments} <= {0, OVERLAP_SECONDS}
    unique = [segment.samples[: segment.next_start - segment.start] for segment in segments]
    assert np.array_equal(np.concatenate(unique), audio)
    apart = [segment.samples for segment in Segmenter(RATE, overlaps=False).split([audio])]
    assert max(map(len, apart)) <= MAX_SEGMENT_SECONDS * RATE
    assert np.array_equal(np.concatenate(apart), audio)


def test_segments_that_may_not_overlap_end_where_it_is_quietest() -> None:
    audio = noise(40)
    audio[28 * RATE : round(28.02 * RATE)] //= 2  # too short and too loud for a pause
    first, _ = Segmenter(RATE, overlaps=False).split([audio])
    assert first.next_start / RATE == pytest.approx(28.01)


def test_long_pause_ends_any_segment_and_short_pause_a_long_one() -> None:
    words, breath, pause = noise(4), noise(0.3, 10), noise(0.8, 10)
    short = cut(words, breath, words, pause, words)
    assert [round(len(segment.samples) / RATE, 1) for segment in short] == [8.7, 4.4]
    first, _ = cut(words, noise(3, 10), words)
    assert len(first.samples) / RATE == pytest.approx(4 + 3 - 0.5, abs=0.05)
    first, second = cut(noise(0.4), pause, noise(3), pause, noise(3))  # at least a second
    assert len(first.samples) > 4 * RATE and second.overlap == 0
    first, _ = cut(noise(5), noise(1, 300), noise(5))  # noise is 20 dB below speech
    assert len(first.samples) / RATE == pytest.approx(5.5, abs=0.1)
    long = cut(*[words, breath] * 10)
    assert all(segment.overlap == 0 for segment in long)
    assert len(long) <= 6
    edges = [segment.next_start / RATE % 4.3 for segment in long[:-1]]
    assert edges == pytest.approx([4.15] * len(edges), abs=0.15)


@pytest.mark.parametrize("block", [0.01, 1.0, 7.3, 100.0])
def test_segments_do_not_depend_on_block_size(block: float) -> None:
    parts = [noise(13), noise(0.6, 10), noise(40), noise(0.3, 10), noise(5)]
    sizes, expected = (
        [(segment.start, len(segment.samples), segment.overlap) for segment in segments]
        for segments in (cut(*parts, block=block), cut(*parts))
    )
    assert sizes == expected


def test_find_gap_is_the_longest_in_the_middle_half_of_the_overlap() -> None:
    """The last 16 of 40 frames are shared; their middle half is 28 to 35."""
    for silent, expected in (
        ([*range(30, 34)], 32),
        ([*range(24, 28), 30, 31, *range(33, 37)], 34),  # the gap continues past the middle half
        ([*range(24, 30), *range(33, 36)], 34),
        ([*range(24, 40)], 32),
    ):
        log_probs = np.full((40, 3), -5.0)
        log_probs[:, 2] = 0.0
        log_probs[silent, 0] = 1.0
        assert find_gap(log_probs, 16, {0, 1}) == expected


@pytest.mark.parametrize("frame", [320, 640, 1280])
def test_joined_segments_have_the_zeros_only_after_the_last(frame: int) -> None:
    """Else the words of an hour are late, by 0.2 s for each pause."""
    tone = (9000 * np.sin(np.arange(40 * RATE))).astype(np.int16)
    clip = np.concatenate([tone[: 9 * RATE], np.zeros(2 * RATE, np.int16), tone])
    starts: list[int] = []

    def encode(segment: Segment) -> Encoded:
        starts.append(segment.start)
        count = (len(segment.samples) + tail_samples(RATE)) // frame
        times = segment.start / frame + np.arange(count)
        return Encoded(np.stack([times, np.zeros_like(times)], 1))  # silent, except at 0

    joined = encode_in_segments(clip, Segmenter(RATE, frame), {0}, encode).log_probs[:, 0]
    assert len(starts) == 3  # a pause, and an overlap
    assert len(joined) == pytest.approx((len(clip) + 3200) / frame, abs=1)
    assert joined == pytest.approx(np.arange(len(joined)), abs=1)


@pytest.mark.parametrize("block", [0.01, 0.7, 7.3, 100.0])
def test_segmenter_takes_pauses_from_a_detector(block: float) -> None:
    runs = [(seconds, 0.3 + 0.6 * spoken) for seconds, spoken in is_speech(0.5, 4, 1, 5, 0.1, 9, 2)]
    audio, size = script(*runs), round(block * RATE)
    blocks = [audio[start : start + size] for start in range(0, len(audio), size)]
    cutter = Segmenter(RATE, 640, detector=VoiceDetector(ScriptedSpeech()))
    assert [len(segment.samples) / RATE for segment in cutter.split(blocks)] == [5.0, 16.6]
    assert len(list(Segmenter(RATE, 640).split(blocks))) == 1


def pauses_of(audio: Samples) -> Pauses:
    pauses = Pauses(VoiceDetector(ScriptedSpeech()), RATE)
    pauses.add(audio)
    return pauses


def test_pauses_before_a_segment_are_forgotten() -> None:
    """Once, each segment of a source scanned all pauses since its start: 48 s in eight hours."""
    audio = script(*[(1.0, 0.3), (4.0, 0.9)] * 12)
    pauses = pauses_of(audio)
    for start in range(0, len(audio), RATE // 3):
        samples = audio[start : start + 10 * RATE]
        assert pauses.within(samples, start) == pauses_of(audio).within(samples, start)
    assert len(pauses._edges) < 3

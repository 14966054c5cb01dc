"""Segments of audio that a model can take: cut in pauses, or with an overlap if there are none.

A pause is quiet, or lies between the speech that a voice detector finds. Audio arrives in blocks,
and no more than a segment and a block are held. Where a cut is depends only on the 30 s before it,
so the size of the blocks changes nothing.

Two overlapping segments contain the same audio. Their log-probabilities are cut at one frame, in
the longest gap between two tokens of the first segment, so that no word is lost or repeated: CTC
has a frame for each moment, independent of the decoder.

Legend: S samples, W windows of 20 ms, U frames, V vocabulary.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sbkit.audio.io import Samples
from sbkit.audio.levels import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.arrays import LogProbs
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.runtime.voice_detector import SpeechEvent, VoiceDetector

MAX_SEGMENT_SECONDS = 30.0  # attention grows with the square of the length
MIN_SEGMENT_SECONDS = 1.0  # before a long pause ends a segment
LONG_PAUSE_SECONDS = 0.5
MARGIN_SECONDS = 0.5  # of a pause that is left before speech
OVERLAP_SECONDS = 4.0  # that two segments share if speech does not pause


@dataclass(frozen=True)
class Segment:
    """Audio that a model takes at once, and where it is in its source.

    samples: (S,) of int16, a copy, so that the block that it is cut from can be freed.
    start: the index of its first sample in the source.
    overlap: how many of its last samples the next segment has, too; 0 if it ends in a pause.
    """

    samples: Samples
    start: int
    overlap: int = 0

    @property
    def next_start(self) -> int:
        """The index of the first sample of the next segment."""
        return self.start + len(self.samples) - self.overlap


@dataclass(frozen=True)
class Segmenter:
    """Cut a stream of samples into segments.

    multiple: the starts of overlapping segments differ by multiples of this many samples.
    min_seconds: before a long pause ends a segment.
    detector: finds the pauses; without one they are found by level.

    >>> tone = (9000 * np.sin(np.arange(16_000))).astype(np.int16)
    >>> blocks = [tone, np.zeros(16_000, np.int16), tone]
    >>> [len(segment.samples) for segment in Segmenter(16_000).split(blocks)]
    [24000, 24000]
    """

    sample_rate: int
    multiple: int = 1
    min_seconds: float = MIN_SEGMENT_SECONDS
    detector: VoiceDetector | None = None

    def split(self, blocks: Iterable[Samples]) -> Iterator[Segment]:
        """Yield the segments of blocks (S,); the last one may be empty.

        A segment ends in the first long pause after ``min_seconds``. Before it exceeds
        MAX_SEGMENT_SECONDS it ends in its longest pause. Without a pause it ends there, and the
        next segment repeats its last OVERLAP_SECONDS.
        """
        pending = np.empty(0, np.int16)
        segment, pauses = Segment(pending, 0), Pauses(self.detector, self.sample_rate)
        for block in blocks:
            pauses.add(block)
            pending = np.concatenate([pending, block])
            while len(pending) > self._max_samples:
                segment = self._first(pending, pauses, after=segment)
                yield segment
                pending = pending[len(segment.samples) - segment.overlap :]
        while True:
            segment = self._first(pending, pauses, after=segment)
            yield segment
            pending = pending[len(segment.samples) :]
            if not len(pending):
                return

    @property
    def _max_samples(self) -> int:
        return seconds_to_samples(MAX_SEGMENT_SECONDS, self.sample_rate)

    def _first(self, pending: Samples, pauses: "Pauses", *, after: Segment) -> Segment:
        """Return the first segment of pending samples (S,), which follows another one."""
        start = after.next_start
        ahead, is_longer = pending[: self._max_samples], len(pending) > self._max_samples
        window = self.sample_rate // WINDOWS_PER_SECOND
        count = len(ahead) // window
        min_windows = max(self.min_seconds * WINDOWS_PER_SECOND, after.overlap / window)
        cuts = [  # the length of each pause, and its cut: the middle, or MARGIN before the end
            (end - first, end - min((end - first) // 2, round(MARGIN_SECONDS * WINDOWS_PER_SECOND)))
            for first, end in pauses.within(ahead, start)
            if (is_longer or end < count) and (first > 0 or end - first == count)
        ]
        cuts = [(length, cut) for length, cut in cuts if cut >= min_windows]
        for length, cut in cuts:
            if length >= LONG_PAUSE_SECONDS * WINDOWS_PER_SECOND:
                return Segment(pending[: cut * window].copy(), start)
        if not is_longer:
            return Segment(pending, start)
        length, cut = max(cuts, default=(0, 0))
        if length >= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND:
            return Segment(pending[: cut * window].copy(), start)
        step = self._max_samples - seconds_to_samples(OVERLAP_SECONDS, self.sample_rate)
        return Segment(ahead, start, self._max_samples - step // self.multiple * self.multiple)


class Pauses:
    """The pauses of one source, which arrives block by block."""

    def __init__(self, detector: VoiceDetector | None, sample_rate: int) -> None:
        self._detector, self._rate = detector, sample_rate
        self._state = None if detector is None else detector.start()
        self._events: list[SpeechEvent] = []

    def add(self, block: Samples) -> None:
        """Take the next block (S,)."""
        if self._detector is not None and self._state is not None:
            events, self._state = self._detector.push(block, self._state)
            self._events += events

    def within(self, samples: Samples, start: int) -> list[list[int]]:
        """Return the pauses of samples (S,) as `find_pauses` does, in windows.

        start: the index of the first of them in the source.
        """
        window, rate = self._rate // WINDOWS_PER_SECOND, self._rate
        if self._detector is None:
            return find_pauses(samples, window)
        end = samples_to_seconds(start + len(samples), rate)
        times = [0.0, *(event.seconds for event in self._events if event.detected <= end), end]
        edges = np.rint((np.array(times[: len(times) // 2 * 2]) * rate - start) / window)
        pauses: list[list[int]] = (
            edges.clip(0, len(samples) // window).astype(int).reshape(-1, 2).tolist()
        )
        return [[first, after] for first, after in pauses if after > first]


def find_gap(log_probs: LogProbs, overlap: int, silent: Collection[int]) -> int:
    """Return the frame to cut (U, V) at, in the middle half of the last ``overlap`` frames.

    It is the middle of the longest gap between tokens there. If every frame has a token, it is the
    first frame of that half.

    silent: the tokens without speech, blank and space.
    """
    first, last = len(log_probs) - 3 * overlap // 4, len(log_probs) - overlap // 4
    spoken = np.flatnonzero(~np.isin(log_probs[first:last].argmax(1), list(silent)))
    edges = np.concatenate([[-1], spoken, [last - first]])
    longest = int(np.argmax(np.diff(edges)))
    return first + int(edges[longest] + edges[longest + 1] + 1) // 2

"""Segments of long audio, cut in pauses.

Legend: S samples, W windows of 20 ms, U frames, V vocabulary.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import Float32s, LogProbs
from sbkit.base.units import samples_to_seconds, seconds_to_samples

MAX_SEGMENT_SECONDS = 30.0  # attention grows with the square of the length
MIN_SEGMENT_SECONDS = 1.0  # a long pause ends a segment only if it is longer than this
LONG_PAUSE_SECONDS = 0.5
MARGIN_SECONDS = 0.5  # a cut pause leaves at most this much silence before the next speech
OVERLAP_SECONDS = 4.0  # of two segments without a pause between them
TAIL_SECONDS = 0.2  # of zeros after a clip or a stream: CTC writes a letter frames after its sound

WINDOWS_PER_SECOND = 50
SHORT_PAUSE_SECONDS = 0.2  # the closure of a stop consonant lasts up to 0.15
NOISE_AND_SPEECH_PERCENTILES = (5, 95)  # of the levels of a clip's windows

# A window is a pause if it is at most 3 steps of int16 or 35 dB below speech, or, where noise is 15
# dB below speech, within 6 dB of the noise.
PAUSE_BELOW_SPEECH_DB, PAUSE_ABOVE_NOISE_DB, MIN_SNR_DB, SILENCE_DB = 35.0, 6.0, 15.0, 10.0


def find_pauses(samples: Samples, window: int) -> list[list[int]]:
    """Find the pauses of a clip: (S,) -> [first window, end window] of each.

    >>> find_pauses(np.repeat(np.int16([9000, 0, 9000]), 320), window=160)
    [[2, 4]]
    """
    if len(samples) < window:
        return []
    levels = window_levels(samples, window)
    noise, speech = np.percentile(levels, NOISE_AND_SPEECH_PERCENTILES).tolist()
    threshold = max(speech - PAUSE_BELOW_SPEECH_DB, SILENCE_DB)
    if speech - noise >= MIN_SNR_DB:
        threshold = max(threshold, noise + PAUSE_ABOVE_NOISE_DB)
    is_quiet = np.concatenate([[False], levels < threshold, [False]])
    pauses: list[list[int]] = np.flatnonzero(is_quiet[1:] != is_quiet[:-1]).reshape(-1, 2).tolist()
    return pauses


def window_levels(samples: Samples, window: int) -> Float32s:
    """Measure windows in dB above one step of int16: (S,) -> (W,)."""
    windows = samples[: len(samples) // window * window].reshape(-1, window).astype(np.float32)
    levels: Float32s = 10 * np.log10(np.square(windows).mean(1) + 1)
    return levels


class PauseDetector(Protocol):
    """Finds speech in a stream, as `sbkit.tasks.vad.predict.VoiceDetector` does."""

    def start(self) -> Any:
        """Return the state of a stream before its first sample."""

    def push(self, samples: Samples, state: Any) -> tuple[Sequence[Any], Any]:
        """Return the new starts and ends of speech, as `SpeechEvent`s, and the new state."""


@dataclass(frozen=True)
class Segment:
    """Audio that a model takes at once, and its position in the recording."""

    samples: Samples  # a copy, so that the blocks can be freed
    start: int  # the index of its first sample in the recording
    overlap: int = 0  # samples that it shares with the next segment; 0 if it ends in a pause

    @property
    def next_start(self) -> int:
        return self.start + len(self.samples) - self.overlap

    def num_frames(self, frame_samples: int) -> int:
        return round(len(self.samples) / frame_samples)

    def end_frame(
        self, log_probs: LogProbs, frame_samples: int, silent_ids: Collection[int]
    ) -> tuple[int, int]:
        """Return where to end log-probabilities (U, V), and how many frames the next one skips."""
        if not self.overlap:
            return len(log_probs), 0
        log_probs = log_probs[: self.num_frames(frame_samples)]  # without appended silence
        num_frames = len(log_probs)
        next_segment_frame = (self.next_start - self.start) // frame_samples
        end = find_gap(log_probs, num_frames - next_segment_frame, silent_ids)
        return end, end - next_segment_frame


def tail_samples(sample_rate: int) -> int:
    """Count the zeros that a recognizer reads after a clip, a stream or a turn."""
    return seconds_to_samples(TAIL_SECONDS, sample_rate)


def max_unsegmented_samples(eval_batch_seconds: float, sample_rate: int) -> int:
    """Return the length of the longest recording that is evaluated without segments."""
    return seconds_to_samples(max(eval_batch_seconds, MAX_SEGMENT_SECONDS), sample_rate)


@dataclass(frozen=True)
class Segmenter:
    """Cut a stream of samples into segments.

    >>> tone = (9000 * np.sin(np.arange(16_000))).astype(np.int16)
    >>> blocks = [tone, np.zeros(16_000, np.int16), tone]
    >>> [len(segment.samples) for segment in Segmenter(16_000).split(blocks)]
    [24000, 24000]
    """

    sample_rate: int
    frame_samples: int = 1  # overlapping segments start a multiple of this many samples apart
    detector: PauseDetector | None = None  # finds pauses; without one, quiet audio is a pause
    overlaps: bool = True  # False: audio without a pause is cut where it is quietest

    def split(self, blocks: Iterable[Samples]) -> Iterator[Segment]:
        """Yield the segments of blocks (S,); the last one may be empty.

        A segment ends in the first long pause after MIN_SEGMENT_SECONDS, else in its longest pause
        before MAX_SEGMENT_SECONDS. Without any, the next segment repeats its last OVERLAP_SECONDS,
        or it ends in their quietest window.
        """
        pending = np.empty(0, np.int16)
        segment = Segment(pending, 0)
        pauses = Pauses(self.detector, self.sample_rate)
        for block in blocks:
            pauses.add(block)
            pending = np.concatenate([pending, block])
            while len(pending) > self._max_samples:
                segment = self._next_segment(pending, pauses, previous=segment)
                yield segment
                pending = pending[len(segment.samples) - segment.overlap :]
        while True:
            segment = self._next_segment(pending, pauses, previous=segment)
            yield segment
            pending = pending[len(segment.samples) :]
            if not len(pending):
                return

    @property
    def _max_samples(self) -> int:
        return seconds_to_samples(MAX_SEGMENT_SECONDS, self.sample_rate)

    def _next_segment(self, pending: Samples, pauses: "Pauses", *, previous: Segment) -> Segment:
        start = previous.next_start
        head = pending[: self._max_samples]
        has_more = len(pending) > len(head)
        cuts = self._possible_cuts(head, pauses, previous=previous, has_more=has_more)
        for cut in cuts:
            if cut.pause_windows >= LONG_PAUSE_SECONDS * WINDOWS_PER_SECOND:
                return self._segment_until(cut, head, start)
        if not has_more:
            return Segment(head.copy(), start)
        if cuts:
            longest = max(cuts)
            if longest.pause_windows >= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND:
                return self._segment_until(longest, head, start)
        shift = self._max_samples - seconds_to_samples(OVERLAP_SECONDS, self.sample_rate)
        if not self.overlaps:
            window = self._window_samples
            quietest = int(window_levels(head[shift:], window).argmin())
            return Segment(head[: shift + quietest * window + window // 2].copy(), start)
        shift = shift // self.frame_samples * self.frame_samples
        return Segment(head.copy(), start, overlap=self._max_samples - shift)

    def _possible_cuts(
        self, head: Samples, pauses: "Pauses", *, previous: Segment, has_more: bool
    ) -> list["_Cut"]:
        """Return the pauses of samples (S,) where a segment may end."""
        num_windows = len(head) // self._window_samples
        overlap = previous.overlap / self._window_samples
        min_windows = max(MIN_SEGMENT_SECONDS * WINDOWS_PER_SECOND, overlap)
        margin = round(MARGIN_SECONDS * WINDOWS_PER_SECOND)
        cuts: list[_Cut] = []
        for first, end in pauses.within(head, previous.next_start):
            pause_windows = end - first
            cut_window = end - min(pause_windows // 2, margin)
            is_leading = first == 0 and pause_windows < num_windows
            is_trailing = end == num_windows and not has_more
            if cut_window >= min_windows and not is_leading and not is_trailing:
                cuts.append(_Cut(pause_windows, cut_window))
        return cuts

    def _segment_until(self, cut: "_Cut", head: Samples, start: int) -> Segment:
        return Segment(head[: cut.window * self._window_samples].copy(), start)

    @property
    def _window_samples(self) -> int:
        return self.sample_rate // WINDOWS_PER_SECOND


class _Cut(NamedTuple):
    """A pause, and the window in it where a segment may end."""

    pause_windows: int
    window: int


class _Edge(NamedTuple):
    """A change between pause and speech, as detected from the audio up to ``detected``."""

    seconds: float
    detected: float


class Pauses:
    """The pauses of one recording, whose samples arrive block by block."""

    def __init__(self, detector: PauseDetector | None, sample_rate: int) -> None:
        self._detector = detector
        self._rate = sample_rate
        self._state = None if detector is None else detector.start()
        # The start and the end of each pause in turn. Audio begins with a pause.
        self._edges = [_Edge(0.0, 0.0)]

    def add(self, block: Samples) -> None:
        if self._detector is not None and self._state is not None:
            events, self._state = self._detector.push(block, self._state)
            self._edges += [_Edge(event.seconds, event.detected) for event in events]

    def within(self, samples: Samples, start: int) -> list[list[int]]:
        """Return [first window, end window] of each pause in samples (S,).

        start: the index of the first sample in the recording; later calls have later starts.
        """
        window = self._rate // WINDOWS_PER_SECOND
        if self._detector is None:
            return find_pauses(samples, window)
        end = samples_to_seconds(start + len(samples), self._rate)
        while len(self._edges) >= 2:
            pause_end = self._edges[1]
            if pause_end.detected > end or pause_end.seconds * self._rate > start:
                break
            del self._edges[:2]
        times = [edge.seconds for edge in self._edges if edge.detected <= end]
        if len(times) % 2:
            times.append(end)  # the last pause has not ended
        edges = np.rint((np.array(times) * self._rate - start) / window)
        pauses = edges.clip(0, len(samples) // window).astype(int).reshape(-1, 2).tolist()
        return [pause for pause in pauses if pause[1] > pause[0]]


def find_gap(log_probs: LogProbs, overlap: int, silent_ids: Collection[int]) -> int:
    """Return the frame at which to cut log-probabilities (U, V): the middle of the longest gap.

    Only the middle half of the last ``overlap`` frames is searched. If all of them have tokens
    of speech, the first one is returned.

    silent_ids: the tokens without speech, blank and space.
    """
    first = len(log_probs) - 3 * overlap // 4
    last = len(log_probs) - overlap // 4
    spoken_frames = np.flatnonzero(~np.isin(log_probs[first:last].argmax(1), list(silent_ids)))
    edges = np.concatenate([[-1], spoken_frames, [last - first]])
    longest = int(np.argmax(np.diff(edges)))
    return first + int(edges[longest] + edges[longest + 1] + 1) // 2

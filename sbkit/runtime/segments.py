"""Audio in pieces that a model can take: cut in pauses, and with an overlap where there is none.

Pauses are what is quiet, or what a detector of voice activity leaves between speech.
Audio comes in blocks, and no more than a piece and a block is held. The place of a cut depends only
on the 30 s before it, so that the size of the blocks changes nothing.

Two overlapping pieces see the same audio. Their log-probabilities are cut at one frame, in the
longest gap between two tokens of the first one, so that no word is lost and none is there twice:
CTC has a frame for each moment, independent of the decoder.

Legend: S samples, W windows of 20 ms, U frames, V vocabulary.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS, find_pauses
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.decoding.frames import LogProbs
from sbkit.runtime.voice_detector import SpeechEvent, VoiceDetector

LONGEST = 30.0  # seconds; attention grows with the square of the length
SHORTEST = 1.0  # seconds of a piece before a long pause ends it
LONG_PAUSE, SHORT_PAUSE = 0.5, 0.2  # seconds; the closure of a stop consonant lasts up to 0.15
MARGIN = 0.5  # seconds of a pause that are left before speech
OVERLAP = 4.0  # seconds that two pieces share where speech does not pause


@dataclass(frozen=True)
class Piece:
    """Audio that a model takes at once, and where it is in its source.

    samples: (S,) of int16, of no other memory, so that the block that it is cut from can go; start:
    its first sample in the source; overlap: how many of its last samples the piece after it has,
    too; 0 where the cut is in a pause.
    """

    samples: Samples
    start: int
    overlap: int = 0

    @property
    def next_start(self) -> int:
        """The first sample of the piece after it."""
        return self.start + len(self.samples) - self.overlap


@dataclass(frozen=True)
class Cutter:
    """Cut a stream of samples into pieces.

    multiple: of samples, by which the starts of overlapping pieces differ; shortest: seconds;
    detector: finds the pauses, None for those by level.
    """

    sample_rate: int
    multiple: int = 1
    shortest: float = SHORTEST
    detector: VoiceDetector | None = None

    def pieces(self, blocks: Iterable[Samples]) -> Iterator[Piece]:
        """Yield the pieces of blocks, (S,) each; the last one holds what is left, if only nothing.

        A piece ends in the first long pause after ``shortest`` seconds. Before it gets longer than
        LONGEST it ends in its longest pause, and without a pause there, with an overlap, all of
        which the next piece holds.
        """
        held = np.empty(0, np.int16)
        piece, pauses = Piece(held, 0), Pauses(self.detector, self.sample_rate)
        for block in blocks:
            pauses.add(block)
            held = np.concatenate([held, block])
            while len(held) > self._longest:
                piece = self._first(held, pauses, after=piece)
                yield piece
                held = held[len(piece.samples) - piece.overlap :]
        while True:
            piece = self._first(held, pauses, after=piece)
            yield piece
            held = held[len(piece.samples) :]
            if not len(held):
                return

    @property
    def _longest(self) -> int:
        return seconds_to_samples(LONGEST, self.sample_rate)

    def _first(self, held: Samples, found: "Pauses", *, after: Piece) -> Piece:
        """Take the first piece of what is held, which follows another one."""
        start, ahead, goes_on = after.next_start, held[: self._longest], len(held) > self._longest
        window = self.sample_rate // WINDOWS
        count, least = len(ahead) // window, max(self.shortest * WINDOWS, after.overlap / window)
        pauses = [  # how long each is, and where it is cut: in its middle, or MARGIN before its end
            (end - first, end - min((end - first) // 2, round(MARGIN * WINDOWS)))
            for first, end in found.within(ahead, start)
            if (goes_on or end < count) and (first > 0 or end - first == count)
        ]
        pauses = [(length, cut) for length, cut in pauses if cut >= least]
        for length, cut in pauses:
            if length >= LONG_PAUSE * WINDOWS:
                return Piece(held[: cut * window].copy(), start)
        if not goes_on:
            return Piece(held, start)
        length, cut = max(pauses, default=(0, 0))
        if length >= SHORT_PAUSE * WINDOWS:
            return Piece(held[: cut * window].copy(), start)
        following = self._longest - seconds_to_samples(OVERLAP, self.sample_rate)
        return Piece(ahead, start, self._longest - following // self.multiple * self.multiple)


class Pauses:
    """The pauses of one source, which is given block by block."""

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
        """Find what these samples (S,) tell of pauses, in windows: as `find_pauses`.

        start: the first of them in the source.
        """
        window, rate = self._rate // WINDOWS, self._rate
        if self._detector is None:
            return find_pauses(samples, window)
        end = samples_to_seconds(start + len(samples), rate)
        times = [0.0, *(each.seconds for each in self._events if each.known <= end), end]
        edges = np.rint((np.array(times[: len(times) // 2 * 2]) * rate - start) / window)
        pauses: list[list[int]] = (
            edges.clip(0, len(samples) // window).astype(int).reshape(-1, 2).tolist()
        )
        return [[first, after] for first, after in pauses if after > first]


def find_gap(log_probs: LogProbs, overlap: int, silent: Collection[int]) -> int:
    """Return the frame to cut at: in the longest gap of the middle half of the last ``overlap``.

    silent: the tokens that are no speech, blank and space. Without a gap it is in the middle.
    """
    first, last = len(log_probs) - 3 * overlap // 4, len(log_probs) - overlap // 4
    spoken = np.flatnonzero(~np.isin(log_probs[first:last].argmax(1), list(silent)))
    edges = np.concatenate([[-1], spoken, [last - first]])
    longest = int(np.argmax(np.diff(edges)))
    return first + int(edges[longest] + edges[longest + 1] + 1) // 2

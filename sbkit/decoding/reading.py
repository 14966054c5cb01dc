"""Decoding of many clips, in as many processes as there are cores where that is worth it.

A beam search is Python, which uses one core of a process: 140 seconds of audio per second.
"""

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, TypeVar

from sbkit.base.errors import SbkitError
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.clip_reader import ClipReader, Recognized
from sbkit.decoding.decoder import KINDS
from sbkit.decoding.frames import LogProbs

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

MANY_FRAMES = 5000  # 200 s, after which processes are started; each takes half a second for it
MOST_PROCESSES = 16  # each has language models and caches of its own, 0.1 GB of the default run

SAFE_PATH = "PYTHONSAFEPATH"

Read = TypeVar("Read")

_own: ClipReader  # of a process that decodes


@dataclass(frozen=True, eq=False, kw_only=True)
class HeardClip:
    """What a model heard in a clip.

    log_probs: (U, V); samples: of the clip; begin: where it begins in the audio that it is cut
    from, in seconds; attention: its attention decoder, where that takes part.
    """

    log_probs: LogProbs
    samples: int
    begin: float = 0.0
    attention: AttentionDecoder | None = None


class Reading:
    """Decode clips as one reader does; processes are started when they are needed first."""

    def __init__(self, reader: ClipReader, *, processes: int) -> None:
        """Take a reader; processes: as many as there may be."""
        self.reader, self._count = reader, min(processes, MOST_PROCESSES)
        self._starting = threading.Lock()
        self._processes: ProcessPoolExecutor | None = None
        self._frames = 0

    def read(self, clips: Sequence[HeardClip], *, times: bool) -> list[Recognized | SbkitError]:
        """Return what is said in each clip, or why it cannot be decoded.

        times: whether its words have times, which count from the begin of its audio.

        Raises:
            SbkitError: a process ended, or another thread called `close`.
        """
        self._frames += sum(len(clip.log_probs) for clip in clips)
        if self._count < 2 or self._frames < MANY_FRAMES or not self._is_slow():
            return [_attempt(self.reader, clip, times) for clip in clips]
        from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        try:
            return list(self._started().map(_read, clips, [times] * len(clips)))
        except ShutdownExecutorError as error:
            raise SbkitError(
                "Clips must be decoded before what decodes them is closed, but it was closed "
                "meanwhile. Close it once all threads are done."
            ) from error
        except OSError:  # there is no shared memory for their locks
            self._count = 1
            self.close()
            return self.read(clips, times=times)
        except BrokenProcessPool as error:
            self.close()
            raise SbkitError(
                f"The {self._count} processes that decode must run to their end, but one was ended "
                "from outside, perhaps for its memory. Pass --decoder greedy, or free memory."
            ) from error

    def close(self) -> None:
        """End the processes."""
        with self._starting:
            if self._processes is not None:
                self._end()
                self._processes = None

    def _is_slow(self) -> bool:
        """Return whether it searches in Python, without the model that attention needs."""
        decoder = self.reader.decoder
        return decoder is not None and decoder.kind == KINDS[0] and decoder.attention is None

    def _started(self) -> "ProcessPoolExecutor":
        # multiprocessing's own run the main module of a program once more, which a program that
        # only uses a Transcriber is not made for; and a fork copies locks that threads hold.
        from loky import ProcessPoolExecutor

        with self._starting:
            if self._processes is None:
                # loky's `python -m` and `-c` would look for modules in the working folder first.
                is_set, own = SAFE_PATH in os.environ, {SAFE_PATH: "1"}
                os.environ.update(own)
                try:
                    made = ProcessPoolExecutor(
                        self._count, initializer=_keep, initargs=(self.reader,), env=own
                    )
                    resource_tracker.ensure_running()
                finally:
                    if not is_set:
                        del os.environ[SAFE_PATH]
                # Also for who never closes it: at the interpreter's own end loky's fails aloud.
                self._end = weakref.finalize(self, _end, made, os.getpid())
                self._processes = made
            return self._processes


def _end(processes: "ProcessPoolExecutor", owner: int) -> None:
    """End the processes, but not from a fork of the one that has them."""
    if os.getpid() == owner:
        processes.shutdown(kill_workers=True)


def _keep(reader: ClipReader) -> None:
    global _own
    _own = reader


def _read(clip: HeardClip, times: bool) -> Recognized | SbkitError:
    return _attempt(_own, clip, times)


def _attempt(reader: ClipReader, clip: HeardClip, times: bool) -> Recognized | SbkitError:
    try:
        found = reader.read(
            clip.log_probs, samples=clip.samples, times=times, attention=clip.attention
        )
    except SbkitError as error:
        return error
    return Recognized(found.text, tuple(each.later(clip.begin) for each in found.words))


def raise_errors(found: Iterable[Read | SbkitError]) -> list[Read]:
    """Return what is said in all clips; raise the first error among them."""
    read = list[Read]()
    for each in found:
        if isinstance(each, SbkitError):
            raise each
        read.append(each)
    return read

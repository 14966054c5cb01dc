"""Batches across requests, in front of the one model thread.

    pieces of many requests -> one queue -> rounds -> batches of similar length -> the model thread
        -> to each request the answers that it waits for

Each request cuts its audio and decodes in a thread of its own, by a `Transcriber` that takes a
`Batcher` for its `ModelThread`. The n-th piece of a call is due n rounds after it came, so that an
hour of audio lets short requests pass, and is never starved by them (fair queueing after Demers,
Keshav and Shenker, 1989).
"""

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.arrays import Counts, Float64s
from sbkit.base.machine import usable_cores
from sbkit.bundle.protocols import Encoded
from sbkit.runtime.model import ModelThread, Shapes, round_up
from sbkit.serve.workers import cancelled


@dataclass(order=True)
class _Queued:
    """A piece that waits: the round in which it is due, and when it came."""

    due: int
    came: float
    samples: Samples = field(compare=False)
    cancelled: threading.Event | None = field(compare=False)
    answer: Future[Encoded] = field(compare=False, default_factory=Future)


class Batcher:
    """A `ModelThread` for many threads, which runs their pieces together."""

    def __init__(
        self,
        thread: ModelThread,
        *,
        shapes: Shapes,
        wait_seconds: float,
        on_batch: Callable[[int, int], object],
    ) -> None:
        """Start to collect.

        wait_seconds: how long a piece waits for others while the model is idle; on_batch: called
        with the clips of each batch, and the samples of one with its padding.
        """
        self._thread, self._shapes = thread, shapes
        self._wait, self._on_batch = wait_seconds, on_batch
        self.effective, self.samples_per_frame = thread.effective, thread.samples_per_frame
        self._at_once = usable_cores() if self.effective.device == "cpu" else 1
        self._queue: list[_Queued] = []  # a heap
        self._samples = self._round = 0  # queued, with padding; rounds so far
        self._changed, self._is_closed = threading.Condition(), False
        self._collector = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._collector.start()

    def __len__(self) -> int:
        """Count the pieces that wait."""
        return len(self._queue)

    def encode_batches(self, batches: Sequence[Sequence[Samples]]) -> list[list[Encoded]]:
        """Run the encoder on clips, in batches with those of others; return them as they came.

        Raises:
            CancelledError: the request was cancelled, or this is closed.
        """
        with self._changed:
            if self._is_closed:
                raise CancelledError
            due, now, event = self._round, monotonic(), cancelled.get()
            clips = enumerate(chain(*batches), start=due)
            queued = [_Queued(place, now, clip, event) for place, clip in clips]
            for each in queued:
                heapq.heappush(self._queue, each)
                self._samples += self._padded(each)
            self._changed.notify()
        found = iter([each.answer.result() for each in queued])
        return [[next(found) for _ in batch] for batch in batches]

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips, as `encode_batches` does."""
        return self.encode_batches([clips])[0]

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Float64s:
        """Ask the attention decoder about tokens, between two rounds."""
        return self._thread.decoder_log_probs(states, tokens)

    def close(self) -> None:
        """Cancel what waits, and end the threads."""
        with self._changed:
            self._is_closed = True
            for each in self._queue:
                each.answer.cancel()
            self._changed.notify()
        self._collector.join()
        self._thread.close()

    def _padded(self, piece: _Queued) -> int:
        return round_up(len(piece.samples), self._shapes.lengths)

    def _run(self) -> None:
        while (pieces := self._next_round()) is not None:
            self._answer(pieces)

    def _next_round(self) -> list[_Queued] | None:
        """Wait for pieces, and take those that are due first; None once this is closed."""
        left, taken = self._at_once * self._shapes.max_samples, list[_Queued]()
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            wait = self._queue[0].came + self._wait - monotonic()
            self._changed.wait_for(lambda: self._samples >= left or self._is_closed, max(0, wait))
            self._round += 1
            while self._queue and left > 0:
                piece = heapq.heappop(self._queue)
                self._samples -= self._padded(piece)
                if piece.cancelled is not None and piece.cancelled.is_set():
                    piece.answer.cancel()
                if piece.answer.set_running_or_notify_cancel():
                    taken.append(piece)
                    left -= self._padded(piece)
        return taken

    def _answer(self, pieces: Sequence[_Queued]) -> None:
        """Run pieces in batches, and answer those who wait for them."""
        lengths = [len(each.samples) for each in pieces]
        places = list(self._shapes.batches(lengths, min_batches=self._at_once))
        batches = [[pieces[place].samples for place in batch] for batch in places]
        try:
            found = self._thread.encode_batches(batches)
        except Exception as error:
            if len(pieces) == 1:
                pieces[0].answer.set_exception(error)
            else:  # the fault of one is not that of the others
                for each in pieces:
                    self._answer([each])
            return
        for batch in places:
            self._on_batch(len(batch), self._padded(pieces[batch[0]]))
        for place, encoded in zip(chain(*places), chain(*found), strict=True):
            pieces[place].answer.set_result(encoded)

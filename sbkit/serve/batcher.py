"""Batches across requests, in front of the one model thread.

    pieces of many requests -> one queue -> rounds -> batches of similar length -> the model thread
        -> each piece's answer to the request that waits for it

Each request cuts its audio and decodes in a thread of its own, by a `Transcriber` that takes a
`Batcher` for its `ModelThread`. The n-th piece of a call is due n rounds after it came, so that an
hour of audio lets short requests pass and yet waits no longer than its own length (fair queueing
after Demers, Keshav and Shenker, 1989).
"""

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.machine import usable_cores
from sbkit.decoding.attention import Counts, Floats
from sbkit.inference.runtime.model import Batch, Encoded, ModelThread
from sbkit.inference.runtime.shapes import Shapes, padded_length

OnBatch = Callable[[int, int], object]


@dataclass(order=True)
class _Queued:
    """A piece that waits: the round in which it is due, and when it came."""

    due: int
    came: float
    samples: Samples = field(compare=False)
    answer: Future[Encoded] = field(compare=False, default_factory=Future)


class Work:
    """What is queued for one request, so that another thread can cancel it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: list[Future[Encoded]] | None = []

    def add(self, answers: Sequence[Future[Encoded]]) -> None:
        """Add answers that are waited for; they are cancelled where the request is."""
        with self._lock:
            if self._answers is not None:
                self._answers = [each for each in self._answers if not each.done()]
                self._answers += answers
                return
        for each in answers:
            each.cancel()

    def cancel(self) -> None:
        """Cancel what waits and what is still to come; a piece that runs is run to its end."""
        with self._lock:
            answers, self._answers = self._answers or [], None
        for each in answers:
            each.cancel()


working_for: ContextVar[Work] = ContextVar("working_for")  # the request of the calling thread


class Batcher:
    """A `ModelThread` for many threads, which runs their pieces together.

    effective: what the model runs on; samples_per_frame: of CTC.
    """

    def __init__(
        self, thread: ModelThread, *, shapes: Shapes, wait_seconds: float, on_batch: OnBatch
    ) -> None:
        """Start to collect.

        wait_seconds: how long a piece waits for others while the model is idle; on_batch: called
        with the clips of each batch and their samples, padding included.
        """
        self._thread, self._shapes = thread, shapes
        self._wait, self._on_batch = wait_seconds, on_batch
        self.effective, self.samples_per_frame = thread.effective, thread.samples_per_frame
        self._at_once = usable_cores() if self.effective.device == "cpu" else 1
        self._queue: list[_Queued] = []
        self._samples = self._round = 0  # queued, with padding; rounds so far
        self._changed, self._is_closed = threading.Condition(), False
        self._collector = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._collector.start()

    def __len__(self) -> int:
        """Count the pieces that wait."""
        return len(self._queue)

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on clips, in batches with those of others; return them as they came.

        Raises:
            CancelledError: the request was cancelled, or the batcher closed.
        """
        now = monotonic()
        with self._changed:
            queued = [
                _Queued(self._round + place, now, clip)
                for place, clip in enumerate(chain.from_iterable(batches))
            ]
            for each in queued:
                heapq.heappush(self._queue, each)
                self._samples += self._padded(each)
            self._changed.notify()
            is_closed = self._is_closed
        answers = [each.answer for each in queued]
        if (work := working_for.get(None)) is not None:
            work.add(answers)
        if is_closed:
            self._cancel_all()
        found = iter([each.result() for each in answers])
        return [[next(found) for _ in batch] for batch in batches]

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens, between two rounds."""
        return self._thread.decoder_log_probs(states, tokens)

    def close(self) -> None:
        """Cancel what waits, and end the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._cancel_all()
        self._collector.join()
        self._thread.close()

    def _cancel_all(self) -> None:
        with self._changed:
            waiting, self._queue = self._queue, []
        for each in waiting:
            each.answer.cancel()

    def _padded(self, piece: _Queued) -> int:
        return padded_length(len(piece.samples), self._shapes.lengths)

    def _run(self) -> None:
        while (pieces := self._next_round()) is not None:
            self._answer(pieces)

    def _next_round(self) -> list[_Queued] | None:
        """Wait for pieces, and take those that are due first; None once this is closed."""
        most, taken = self._at_once * self._shapes.most, list[_Queued]()
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            left = self._queue[0].came + self._wait - monotonic()
            self._changed.wait_for(lambda: self._samples >= most or self._is_closed, max(0, left))
            self._round += 1
            while self._queue and most > 0:
                piece = heapq.heappop(self._queue)
                self._samples -= self._padded(piece)
                if piece.answer.set_running_or_notify_cancel():
                    taken.append(piece)
                    most -= self._padded(piece)
        return taken

    def _answer(self, pieces: Sequence[_Queued]) -> None:
        """Run pieces in batches, and answer those who wait for them."""
        lengths = [len(each.samples) for each in pieces]
        places = list(self._shapes.batches(lengths, fewest=self._at_once))
        batches = [[pieces[place].samples for place in batch] for batch in places]
        try:
            found = self._thread.encode_batches(batches)
        except Exception as error:  # the fault of one piece is not that of the others
            if len(pieces) == 1:
                pieces[0].answer.set_exception(error)
            else:
                for each in pieces:
                    self._answer([each])
            return
        for place, encoded in zip(chain(*places), chain(*found), strict=True):
            pieces[place].answer.set_result(encoded)
        for batch in places:
            self._on_batch(len(batch), len(batch) * self._padded(pieces[batch[-1]]))

"""The threads of requests, and the batches in which they share one model.

    segments of many requests -> one queue -> rounds -> batches of similar length -> the model
        -> to each request the outputs that it waits for

Each request cuts its audio and decodes in a thread of its own, by a `Transcriber` that calls
`Batcher.encode`. The n-th segment of a call is due n rounds after it arrived, so that an hour of
audio lets short requests pass, and is never starved by them (fair queueing after Demers, Keshav and
Shenker, 1989). Sessions of a streaming model have a batcher of their own.
"""

import asyncio
import heapq
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.bundle.protocols import Encoded
from sbkit.runtime.model import ModelThread, Shapes, round_up
from sbkit.streaming.session import Event, Session, forward_batch

Part = TypeVar("Part")
Result = TypeVar("Result")

# Set when the request of a thread ends early: its segments are not run any more.
request_cancelled: ContextVar[threading.Event | None] = ContextVar(
    "request_cancelled", default=None
)


class Workers:
    """Threads for a number of requests at a time; further requests wait."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")

    async def results(
        self,
        work: Callable[[Callable[[Part], None]], Result],
        *,
        on_end: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[Part | Result]:
        """Yield each part that ``work`` passes to its argument at once, then what it returns.

        Once the iterator is closed, the argument of ``work`` raises CancelledError.
        Errors of ``work`` are raised here.

        on_end: called when ``work`` has ended, or will not run.
        """
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Part | Future[Result]]()
        end = threading.Event()

        def put(part: Part | Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(parts.put_nowait, part)

        def give(part: Part) -> None:
            if end.is_set():
                raise CancelledError
            put(part)

        def start() -> Result:
            request_cancelled.set(end)
            return work(give)

        future = self._threads.submit(start)
        future.add_done_callback(lambda _: on_end())
        future.add_done_callback(put)
        try:
            while not isinstance(part := await parts.get(), Future):
                yield part
            yield part.result()
        finally:
            future.cancel()
            end.set()

    def close(self) -> None:
        """Cancel requests that wait, and wait for the others."""
        self._threads.shutdown(cancel_futures=True)


@dataclass(order=True)
class _Queued:
    """A segment that waits: the round in which it is due, and when it arrived."""

    due: int
    arrived: float
    samples: Samples = field(compare=False)
    cancel_event: threading.Event | None = field(compare=False)
    output: Future[Encoded] = field(compare=False, default_factory=Future)


class Batcher:
    """Run the segments of many threads together in one model."""

    def __init__(
        self,
        thread: ModelThread,
        *,
        shapes: Shapes,
        wait_seconds: float,
        on_batch: Callable[[int, int], object],
    ) -> None:
        """Start to collect segments.

        shapes: a closed table.
        wait_seconds: how long a segment waits for others while the model is idle.
        on_batch: called with the number of clips of each batch and the samples of one, padded.
        """
        self._thread, self._shapes = thread, shapes
        self._wait, self._on_batch = wait_seconds, on_batch
        self._round_samples = thread.parallel_batches * shapes.max_samples
        self._queue: list[_Queued] = []  # a heap
        self._samples = self._round = 0  # queued, with padding; rounds so far
        self._changed, self._is_closed = threading.Condition(), False
        self._collector = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._collector.start()

    def __len__(self) -> int:
        """Count the segments that wait."""
        return len(self._queue)

    def encode(self, segments: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on segments (S,), in batches with those of others.

        Raises:
            CancelledError: the request ended, or the batcher is closed.
        """
        with self._changed:
            if self._is_closed:
                raise CancelledError
            now, event = monotonic(), request_cancelled.get()
            queued = [
                _Queued(due, now, samples, event)
                for due, samples in enumerate(segments, start=self._round)
            ]
            for item in queued:
                heapq.heappush(self._queue, item)
                self._samples += self._padded(item)
            self._changed.notify()
        return [item.output.result() for item in queued]

    def close(self) -> None:
        """Cancel segments that wait, and end the thread."""
        with self._changed:
            self._is_closed = True
            for item in self._queue:
                item.output.cancel()
            self._changed.notify()
        self._collector.join()

    def _padded(self, item: _Queued) -> int:
        return round_up(len(item.samples), self._shapes.lengths)

    def _run(self) -> None:
        while (items := self._next_round()) is not None:
            self._encode(items)

    def _next_round(self) -> list[_Queued] | None:
        """Wait for segments, and take those that are due first; None once this is closed."""
        room = self._round_samples
        items: list[_Queued] = []
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            wait = self._queue[0].arrived + self._wait - monotonic()
            self._changed.wait_for(lambda: self._samples >= room or self._is_closed, max(0, wait))
            self._round += 1
            while self._queue and room > 0:
                item = heapq.heappop(self._queue)
                self._samples -= self._padded(item)
                if item.cancel_event is not None and item.cancel_event.is_set():
                    item.output.cancel()
                if item.output.set_running_or_notify_cancel():
                    items.append(item)
                    room -= self._padded(item)
        return items

    def _encode(self, items: Sequence[_Queued]) -> None:
        """Run segments in batches, and hand out the outputs."""
        try:
            outputs = self._thread.encode_by_length(
                [item.samples for item in items], self._shapes, on_batch=self._on_batch
            )
        except Exception as error:
            if len(items) == 1:
                items[0].output.set_exception(error)
            else:  # a faulty segment must not fail the others
                for item in items:
                    self._encode([item])
            return
        for item, output in zip(items, outputs, strict=True):
            item.output.set_result(output)


class SessionBatcher:
    """Run sessions in rounds: those that are fed during one are the batch of the next."""

    def __init__(self, on_batch: Callable[[int], object]) -> None:
        """Begin; on_batch: called with the number of sessions of each round."""
        self._on_batch = on_batch
        self._waiting: list[tuple[Session, asyncio.Future[Sequence[Event]]]] = []
        self._rounds: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")

    async def advance(self, session: Session) -> Sequence[Event]:
        """Run the chunks that a session was fed, and return the new events."""
        if not session.is_due:
            return ()
        events: asyncio.Future[Sequence[Event]] = asyncio.get_running_loop().create_future()
        self._waiting.append((session, events))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run())
        return await events

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while waiting := self._waiting:
            self._waiting = []
            sessions = [session for session, _ in waiting]
            results = await loop.run_in_executor(self._thread, _advance, sessions)
            self._on_batch(len(sessions))
            for result, (_, events) in zip(results, waiting, strict=True):
                if events.done():  # the client has gone
                    continue
                if isinstance(result, Exception):
                    events.set_exception(result)
                else:
                    events.set_result(result)


def _advance(sessions: Sequence[Session]) -> list[list[Event] | Exception]:
    """Run sessions as one batch; a faulty one must not fail the others."""
    try:
        outputs = forward_batch(sessions)
    except Exception as error:
        if len(sessions) == 1:
            return [error]
        return [result for session in sessions for result in _advance([session])]
    return [_read(session, chunks) for session, chunks in zip(sessions, outputs, strict=True)]


def _read(session: Session, chunks: Sequence[LogProbs]) -> list[Event] | Exception:
    try:
        return list(session.read(chunks))
    except Exception as error:
        return error

"""Serve many clients with one model: a thread for each request, and batches across requests."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

Message = TypeVar("Message")
Result = TypeVar("Result")
Item = TypeVar("Item")
Output = TypeVar("Output")

# Set when the request of a thread ends early, so that its segments are no longer run.
request_cancelled: ContextVar[threading.Event] = ContextVar("request_cancelled")


class Workers:
    """Threads that process up to ``num_threads`` requests at a time; further requests wait."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")

    async def run(
        self,
        work: Callable[[Callable[[Message], None]], Result],
        *,
        on_end: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[Message | Result]:
        """Call ``work`` in a thread with a function ``send``; yield what it sends, then its result.

        Errors of ``work`` are raised here. Once this iterator is closed, ``send`` raises
        CancelledError.

        on_end: called when ``work`` has ended, or will not run.
        """
        loop = asyncio.get_running_loop()
        queue = asyncio.Queue[Message | Future[Result]]()
        cancelled = threading.Event()

        def put(item: Message | Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def send(item: Message) -> None:
            if cancelled.is_set():
                raise CancelledError
            put(item)

        def work_in_thread() -> Result:
            request_cancelled.set(cancelled)
            return work(send)

        future = self._threads.submit(work_in_thread)
        future.add_done_callback(lambda _: on_end())
        future.add_done_callback(put)
        try:
            while not isinstance(item := await queue.get(), Future):
                yield item
            yield item.result()
        finally:
            future.cancel()
            cancelled.set()

    def close(self) -> None:
        """Cancel waiting requests, and wait until running requests end."""
        self._threads.shutdown(cancel_futures=True)


@dataclass
class _QueuedItem(Generic[Item, Output]):
    """An item that waits for its batch."""

    item: Item
    cancelled: threading.Event
    arrival: float = field(default_factory=monotonic)
    output: Future[Output] = field(default_factory=Future)


@dataclass(eq=False)
class Batcher(Generic[Item, Output]):
    """Run items of many clients in batches, in the order of their arrival."""

    run: Callable[[Sequence[Item]], Sequence[Output | Exception]]  # an output for each item
    size: Callable[[Item], int] = lambda _: 0
    max_size: int = 1  # the total size at which a batch stops waiting for more items
    wait_seconds: float = 0.0  # how long the first item of a batch waits for more items

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[_QueuedItem[Item, Output] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_batches, name="batcher", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._queue.qsize()

    def submit(self, item: Item) -> Future[Output]:
        """Queue an item; its output is canceled if the request of this thread ends first."""
        waiting = _QueuedItem[Item, Output](item, request_cancelled.get(threading.Event()))
        self._queue.put(waiting)
        return waiting.output

    def close(self) -> None:
        """Run the waiting items, and end the thread; no item may be submitted afterwards."""
        self._queue.put(None)
        self._thread.join()

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            for waiting in batch:
                if waiting.cancelled.is_set():
                    waiting.output.cancel()
            batch = [waiting for waiting in batch if waiting.output.set_running_or_notify_cancel()]
            outputs = self._outputs([waiting.item for waiting in batch])
            for waiting, output in zip(batch, outputs, strict=True):
                if isinstance(output, Exception):
                    waiting.output.set_exception(output)
                else:
                    waiting.output.set_result(output)

    def _next_batch(self) -> list[_QueuedItem[Item, Output]]:
        """Wait for items, and return a batch of them; an empty batch once the batcher is closed."""
        batch: list[_QueuedItem[Item, Output]] = []
        size = 0
        waiting = self._queue.get()
        end = monotonic() if waiting is None else waiting.arrival + self.wait_seconds
        with suppress(Empty):
            while waiting is not None:
                batch.append(waiting)
                size += self.size(waiting.item)
                if size >= self.max_size:
                    return batch
                waiting = self._queue.get(timeout=max(0, end - monotonic()))
            self._queue.put(None)  # for the next call
        return batch

    def _outputs(self, items: Sequence[Item]) -> Sequence[Output | Exception]:
        """Run items as one batch; if it fails, run them one by one, so that only bad items fail."""
        try:
            return self.run(items) if items else []
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [output for item in items for output in self._outputs([item])]

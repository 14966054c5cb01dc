"""The threads in which requests are worked on, and what comes of them bit by bit."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Set where the request of a thread is cancelled: its pieces are not run any more.
cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Workers:
    """Threads for so many requests at a time; the others wait."""

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="request")

    async def results(
        self, work: Callable[[Callable[[Item], None]], Result]
    ) -> AsyncGenerator[Item | Result]:
        """Yield what work gives to its argument, as soon as it does, then what it returns.

        Nothing goes on once the iterator is closed or cancelled: the argument raises CancelledError
        then. What work raises is raised.
        """
        loop, found = asyncio.get_running_loop(), asyncio.Queue[Item | Future[Result]]()
        end = threading.Event()

        def put(item: Item | Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found.put_nowait, item)

        def give(item: Item) -> None:
            if end.is_set():
                raise CancelledError
            put(item)

        def start() -> Result:
            cancelled.set(end)
            return work(give)

        future = self._threads.submit(start)
        future.add_done_callback(put)
        try:
            while not isinstance(item := await found.get(), Future):
                yield item
            yield item.result()
        finally:
            future.cancel()
            end.set()

    def close(self) -> None:
        """Cancel what waits, and wait for the rest."""
        self._threads.shutdown(cancel_futures=True)

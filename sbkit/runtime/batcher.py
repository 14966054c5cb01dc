"""Batches of the items of many clients, in the order of their arrival."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")


@dataclass
class _Waiting(Generic[Item, Output]):
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
    max_size: int = 1  # of the items at which a batch waits for no further one
    wait_seconds: float = 0.0  # for which an item waits for others

    def __post_init__(self) -> None:
        self._queue: SimpleQueue[_Waiting[Item, Output] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_batches, name="batcher", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._queue.qsize()

    def submit(self, item: Item, cancelled: threading.Event | None = None) -> Future[Output]:
        """Queue an item and return its output, which is cancelled if the event is set before."""
        waiting = _Waiting[Item, Output](item, cancelled or threading.Event())
        self._queue.put(waiting)
        return waiting.output

    def close(self) -> None:
        """Run what waits, and end the thread; nobody may submit any more."""
        self._queue.put(None)
        self._thread.join()

    def _run_batches(self) -> None:
        while (waiting := self._queue.get()) is not None:
            batch = [waiting]
            end = waiting.arrival + self.wait_seconds
            size = self.size(waiting.item)
            with suppress(Empty):
                while size < self.max_size:
                    next_waiting = self._queue.get(timeout=max(0, end - monotonic()))
                    if next_waiting is None:
                        self._queue.put(None)
                        break
                    batch.append(next_waiting)
                    size += self.size(next_waiting.item)
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

    def _outputs(self, items: Sequence[Item]) -> Sequence[Output | Exception]:
        """Run items as one batch; a faulty item must not fail the others."""
        try:
            return self.run(items) if items else []
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [output for item in items for output in self._outputs([item])]

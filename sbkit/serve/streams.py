"""Live sessions of many clients, in batches of the one model."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sbkit.live.session import Event, Session, advance_batch

Answer = asyncio.Future[Sequence[Event]]


class StreamBatcher:
    """Run sessions in rounds: those whose audio comes during one are the batch of the next."""

    def __init__(self, on_batch: Callable[[int], object]) -> None:
        """Begin; on_batch: called with the number of sessions of each round."""
        self._on_batch = on_batch
        self._waiting: list[tuple[Session, Answer]] = []
        self._rounds: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streams")

    async def advance(self, session: Session) -> Sequence[Event]:
        """Run the chunks that a session was fed, and return what they make known."""
        if not session.is_due:
            return ()
        answer: Answer = asyncio.get_running_loop().create_future()
        self._waiting.append((session, answer))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run())
        return await answer

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _run(self) -> None:
        while waiting := self._waiting:
            self._waiting = []
            sessions, loop = [each for each, _ in waiting], asyncio.get_running_loop()
            work = loop.run_in_executor(self._thread, advance_batch, sessions)
            (found,) = await asyncio.gather(work, return_exceptions=True)
            self._on_batch(len(sessions))
            for place, (_, answer) in enumerate(waiting):
                if answer.done():  # the client has gone
                    continue
                if isinstance(found, BaseException):
                    answer.set_exception(found)
                else:
                    answer.set_result(found[place])

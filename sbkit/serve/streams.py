"""Live sessions of many clients, in batches of the one model."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sbkit.base.arrays import LogProbs
from sbkit.streaming.session import Event, Session, forward_batch

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
        loop = asyncio.get_running_loop()
        while waiting := self._waiting:
            self._waiting = []
            sessions = [each for each, _ in waiting]
            results = await loop.run_in_executor(self._thread, _advance, sessions)
            self._on_batch(len(sessions))
            for result, (_, answer) in zip(results, waiting, strict=True):
                if answer.done():  # the client has gone
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


def _advance(sessions: Sequence[Session]) -> list[list[Event] | Exception]:
    """Run sessions as one batch; the fault of one is not that of the others."""
    try:
        chunks = forward_batch(sessions)
    except Exception as error:
        if len(sessions) == 1:
            return [error]
        return [found for each in sessions for found in _advance([each])]
    return [_read(*each) for each in zip(sessions, chunks, strict=True)]


def _read(session: Session, chunks: Sequence[LogProbs]) -> list[Event] | Exception:
    try:
        return list(session.read(chunks))
    except Exception as error:
        return error

"""A bundle that transcribes the files and turns of many clients, in shared batches.

    segments of many requests -> one queue -> rounds -> batches of similar length -> the model
        -> the outputs that each request waits for

The n-th segment of a request is due n rounds after its arrival, so that short requests overtake an
hour of audio, but never starve it (fair queueing after Demers, Keshav and Shenker, 1989). The
sessions of a streaming model share a batcher of their own.
"""

import asyncio
import heapq
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from io import IOBase
from time import monotonic
from typing import TypeVar

import numpy as np

from sbkit.audio.containers import AudioError
from sbkit.audio.io import Samples, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.protocols import Encoded
from sbkit.runtime.batch_shapes import BatchShapes, round_up
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import ThreadedBundle
from sbkit.serve.middleware import ApiError, Metrics, too_large
from sbkit.tasks.detection.predict import VoiceDetector
from sbkit.tasks.recognition.predict import Transcriber, Transcript
from sbkit.tasks.recognition.session import (
    DEFAULT_RULES,
    Event,
    Final,
    Session,
    StreamingRecognizer,
    advance_batch,
)

READ_AHEAD_SECONDS = 60.0  # of audio that a request reads ahead; batches mix all requests
TURN_SILENCE_SECONDS = 0.5  # as in OpenAI's server_vad; endpoint rules wait longer

Sent = TypeVar("Sent")
Result = TypeVar("Result")

# Set when the request of a thread ends early, so that its segments are no longer run.
request_cancelled: ContextVar[threading.Event] = ContextVar("request_cancelled")


class Workers:
    """Threads that process a number of requests at a time; further requests wait."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")

    async def run(
        self,
        work: Callable[[Callable[[Sent], None]], Result],
        *,
        on_end: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[Sent | Result]:
        """Call ``work`` in a thread with a function ``send``; yield what it sends, then its result.

        Errors of ``work`` are raised here. Once this iterator is closed, ``send`` raises
        CancelledError.

        on_end: called when ``work`` has ended, or will not run.
        """
        loop = asyncio.get_running_loop()
        queue = asyncio.Queue[Sent | Future[Result]]()
        cancelled = threading.Event()

        def put(item: Sent | Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def send(item: Sent) -> None:
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
        """Cancel the requests that wait, and wait for the others to end."""
        self._threads.shutdown(cancel_futures=True)


@dataclass(order=True)
class _Queued:
    """A waiting segment."""

    due: int  # the number of a round
    arrival: float
    samples: Samples = field(compare=False)
    cancelled: threading.Event = field(compare=False)
    output: Future[Encoded] = field(compare=False, default_factory=Future)


@dataclass(eq=False)
class Batcher:
    """Run the segments of many threads together in one model.

    shapes: a closed table.
    wait_seconds: how long a segment waits for others while the model is idle.
    on_batch: called with the number of clips of each batch.
    """

    thread: ModelThread
    shapes: BatchShapes
    wait_seconds: float
    on_batch: Callable[[int], object]

    def __post_init__(self) -> None:
        self._round_samples = self.thread.parallel_batches * self.shapes.max_samples
        self._queue: list[_Queued] = []  # a heap
        self._queued_samples = self._round = 0  # with padding; the rounds so far
        self._changed = threading.Condition()
        self._is_closed = False
        self._collector = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._collector.start()

    def __len__(self) -> int:
        """Return the number of waiting segments."""
        return len(self._queue)

    def encode(self, segments: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on segments (S,), in batches shared with other requests.

        Raises CancelledError if the request ended, or the batcher is closed.
        """
        with self._changed:
            if self._is_closed:
                raise CancelledError
            now = monotonic()
            cancelled = request_cancelled.get(threading.Event())
            queued = [
                _Queued(due, now, samples, cancelled)
                for due, samples in enumerate(segments, start=self._round)
            ]
            for segment in queued:
                heapq.heappush(self._queue, segment)
                self._queued_samples += self._padded_length(segment)
            self._changed.notify()
        return [segment.output.result() for segment in queued]

    def close(self) -> None:
        """Cancel the waiting segments, and end the thread."""
        with self._changed:
            self._is_closed = True
            for segment in self._queue:
                segment.output.cancel()
            self._changed.notify()
        self._collector.join()

    def _padded_length(self, segment: _Queued) -> int:
        return round_up(len(segment.samples), self.shapes.padded_lengths)

    def _run(self) -> None:
        while (segments := self._next_round()) is not None:
            self._encode(segments)

    def _next_round(self) -> list[_Queued] | None:
        """Wait for segments, and take those that are due first; return None once closed."""
        room = self._round_samples
        segments: list[_Queued] = []

        def is_full() -> bool:
            return self._queued_samples >= room or self._is_closed

        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            wait_seconds = self._queue[0].arrival + self.wait_seconds - monotonic()
            self._changed.wait_for(is_full, max(0, wait_seconds))
            self._round += 1
            while self._queue and room > 0:
                segment = heapq.heappop(self._queue)
                self._queued_samples -= self._padded_length(segment)
                if segment.cancelled.is_set():
                    segment.output.cancel()
                if segment.output.set_running_or_notify_cancel():
                    segments.append(segment)
                    room -= self._padded_length(segment)
        return segments

    def _encode(self, segments: Sequence[_Queued]) -> None:
        """Run segments in batches, and hand out the outputs."""
        try:
            outputs = self.thread.encode_by_length(
                [segment.samples for segment in segments], self.shapes, on_batch=self.on_batch
            )
        except Exception as error:
            if len(segments) == 1:
                segments[0].output.set_exception(error)
            else:  # a faulty segment must not fail the others
                for segment in segments:
                    self._encode([segment])
            return
        for segment, output in zip(segments, outputs, strict=True):
            segment.output.set_result(output)


class SessionBatcher:
    """Run sessions in rounds: the sessions fed during one round are the batch of the next.

    on_batch: called with the number of sessions in each round.
    """

    def __init__(self, on_batch: Callable[[int], object]) -> None:
        self._on_batch = on_batch
        self._waiting: list[tuple[Session, asyncio.Future[Sequence[Event]]]] = []
        self._rounds: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")

    async def advance(self, session: Session) -> Sequence[Event]:
        """Process the chunks fed to a session, and return its new events."""
        if not session.has_work:
            return ()
        events: asyncio.Future[Sequence[Event]] = asyncio.get_running_loop().create_future()
        self._waiting.append((session, events))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run())
        return await events

    def close(self) -> None:
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while waiting := self._waiting:
            self._waiting = []
            sessions = [session for session, _ in waiting]
            results = await loop.run_in_executor(self._thread, _advance, sessions)
            self._on_batch(len(sessions))
            for result, (_, events) in zip(results, waiting, strict=True):
                if events.done():
                    pass  # the client has gone
                elif isinstance(result, Exception):
                    events.set_exception(result)
                else:
                    events.set_result(result)


def _advance(sessions: Sequence[Session]) -> list[list[Event] | Exception]:
    """Run sessions as one batch; a faulty session must not fail the others."""
    try:
        return advance_batch(sessions)
    except Exception as error:
        if len(sessions) == 1:
            return [error]
        return [result for session in sessions for result in _advance([session])]


@dataclass
class ClipTurn:
    """The audio of a turn for a whole-clip model; it is created and fed like a `Session`."""

    phrases: tuple[str, ...]
    start: int
    blocks: list[Samples] = field(default_factory=list)
    is_finished: bool = False

    def feed(self, samples: Samples) -> None:
        self.blocks.append(samples)


async def last_of(results: AsyncGenerator[str | Transcript]) -> Transcript:
    """Return the transcript that the results of a file or a turn end with."""
    async with aclosing(results):
        while isinstance(result := await anext(results), str):
            pass
    return result


class RecognitionService:
    """Transcribe the files and turns of many clients at a time.

    silence: seconds that end a turn; None if only clients can end turns.
    """

    def __init__(
        self,
        bundle: ThreadedBundle,
        *,
        shapes: BatchShapes,
        wait_seconds: float,
        max_seconds: float,
        max_turn_seconds: float,
        workers: Workers,
        metrics: Metrics,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Open what clients need; shapes, wait_seconds: see `Batcher`."""
        self.sample_rate, self.language = bundle.config.sample_rate, bundle.config.language
        self.effective = bundle.model.effective
        self._max_seconds = max_seconds
        self._max_turn_seconds = max_turn_seconds
        self._bundle = bundle
        self._shapes = shapes
        self.detector = detector
        self._workers = workers
        self._metrics = metrics
        self.batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait_seconds, on_batch=metrics.clips.observe
        )
        self._sessions = SessionBatcher(metrics.streams.observe)
        self._transcriber = Transcriber(
            bundle=bundle, read_ahead_seconds=READ_AHEAD_SECONDS, encode=self.batcher.encode
        )
        self.streaming: StreamingRecognizer | None = None
        with suppress(SbkitError):  # the model cannot run in chunks
            self.streaming = StreamingRecognizer(bundle=bundle)
        self.silence = None if self.streaming is None else DEFAULT_RULES.silence
        if detector is not None:
            detector.require_rate(self.sample_rate)
            self.silence = TURN_SILENCE_SECONDS

    def warm_up(self) -> None:
        """Run every shape of the table, and once everything after the model."""
        if self._bundle.task.decodes_frames:
            self._bundle.model.warm_up(self._shapes)
        silence = np.zeros(self.sample_rate, np.int16)
        for times in (False, True):
            list(self._transcriber.stream([silence], self.sample_rate, times=times))
        if self.streaming is not None:
            Session(self.streaming).push(silence)
        if self.detector is not None:
            self.detector.speech_segments(silence)

    def transcribe(
        self,
        audio: IOBase | Samples,
        *,
        times: bool,
        phrases: tuple[str, ...] = (),
        channel: int | None = None,
    ) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each segment as soon as it is final, then the transcript.

        audio: samples, or an open file, which is closed in the end.
        times, phrases, channel: as for `Transcriber.stream`.
        """

        def work(on_text: Callable[[str], None]) -> Transcript:
            if isinstance(audio, IOBase):
                self._check_seconds(declared_seconds(audio))
            total_seconds = 0.0

            def count(seconds: float) -> None:
                nonlocal total_seconds
                total_seconds += seconds
                self._check_seconds(total_seconds)  # again: the header may declare too few
                self._metrics.audio.inc(seconds)

            (result,) = self._transcriber.stream(
                [audio],
                self.sample_rate,
                on_seconds=count,
                on_text=on_text,
                phrases=phrases,
                times=times,
                channel=channel,
            )
            if isinstance(result, AudioError):
                raise ApiError(422, str(result), "file")
            if isinstance(result, SbkitError):
                raise result
            return result

        close = audio.close if isinstance(audio, IOBase) else lambda: None
        return self._workers.run(work, on_end=close)

    async def turns(
        self, phrases: tuple[str, ...], silence: float | None
    ) -> Callable[[int], Session | ClipTurn]:
        """Return a function that creates a turn, given the index of its first sample.

        silence: seconds that end a turn if there is no detector; None if the client ends turns.
        """
        streaming = self.streaming
        if streaming is None:
            return partial(ClipTurn, phrases)
        rules = DEFAULT_RULES
        if silence is None:
            rules = replace(rules, max_utterance=self._max_turn_seconds, ends_turns=False)
        elif self.detector is None:
            rules = replace(rules, silence=silence)
        if phrases and self._bundle.decoder is not None:
            streaming = await asyncio.to_thread(
                lambda: StreamingRecognizer(bundle=self._bundle.with_more_hotwords(phrases))
            )
        return lambda start: Session(streaming, rules, offset=start)

    async def advance(self, turn: Session | ClipTurn) -> Sequence[Event]:
        """Process the audio fed to a turn and return its new events.

        A whole-clip turn has events only once it is finished.
        """
        if isinstance(turn, Session):
            return await self._sessions.advance(turn)
        if not turn.is_finished:
            return ()
        samples = np.concatenate(turn.blocks)
        start = samples_to_seconds(turn.start, self.sample_rate)
        transcript = await last_of(self.transcribe(samples, times=True, phrases=turn.phrases))
        end = start + transcript.seconds
        words = tuple(word.later(start) for word in transcript.words)
        final = Final(seconds=end, text=transcript.text, start=start, end=end, words=words)
        return [final] if transcript.text else ()

    def close(self) -> None:
        self._sessions.close()
        self.batcher.close()
        self._transcriber.close()

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self._max_seconds:
            raise too_large(f"{self._max_seconds:g} s of audio")

"""A bundle that transcribes the files and turns of many clients, in common batches."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from io import IOBase

import numpy as np

from sbkit.audio.io import AudioError, Samples, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.runtime.model import Shapes
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.transcriber import Transcriber, Transcript
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.serve.batching import Batcher, SessionBatcher, Workers
from sbkit.serve.middleware import Metrics
from sbkit.serve.responses import ApiError, too_large
from sbkit.streaming.session import Event, Final, Session, StreamingRecognizer

POOL_SECONDS = 60.0  # of a request that are read ahead; batches are made of all requests
TURN_SILENCE_SECONDS = (
    0.5  # as in OpenAI's server_vad; endpoint rules without a detector wait longer
)


@dataclass
class ClipTurn:
    """The audio of a turn for a model of whole clips, made and fed as a `Session` is."""

    phrases: tuple[str, ...]
    start: int
    parts: list[Samples] = field(default_factory=list)
    is_finished: bool = False

    def feed(self, samples: Samples) -> None:
        """Take samples (S,) of int16."""
        self.parts.append(samples)


class Recognizer:
    """Transcribe the files and turns of many clients at a time.

    effective: where and how the model runs.
    streaming: its streaming model, if it has one.
    detector: finds the beginning and the end of turns.
    silence: seconds that end a turn; None if only a client can end one.
    """

    def __init__(
        self,
        bundle: OpenBundle,
        *,
        shapes: Shapes,
        wait_seconds: float,
        max_seconds: float,
        workers: Workers,
        metrics: Metrics,
        detector: VoiceDetector | None = None,
    ) -> None:
        """Take a bundle whose model has a thread of its own.

        shapes, wait_seconds: see `Batcher`.
        max_seconds: of a file or a turn.
        """
        self.sample_rate, self.language = bundle.config.sample_rate, bundle.config.language
        self.effective, self._max_seconds = bundle.model.effective, max_seconds
        self._bundle, self._shapes, self.detector = bundle, shapes, detector
        self._workers, self._metrics = workers, metrics
        self.batcher = Batcher(
            bundle.model, shapes=shapes, wait_seconds=wait_seconds, on_batch=self._on_batch
        )
        self._sessions = SessionBatcher(metrics.streams.observe)
        self._transcriber = Transcriber(
            bundle=bundle, pool_seconds=POOL_SECONDS, encode=self.batcher.encode
        )
        self.streaming = self._streaming(bundle)
        self.silence = None if self.streaming is None else self.streaming.rules.silence
        if detector is not None:
            detector.require_rate(self.sample_rate)
            self.silence = TURN_SILENCE_SECONDS

    def warm_up(self) -> None:
        """Run every shape of the table, and all that follows the model."""
        self._bundle.model.warm_up(self._shapes)
        silence = np.zeros(self.sample_rate, np.int16)
        for times in (False, True):
            list(self._transcriber.stream([silence], self.sample_rate, times=times))
        if self.streaming is not None:
            Session(self.streaming).push(silence)
        if self.detector is not None:
            self.detector.speech_segments(silence)

    def transcribe(
        self, audio: IOBase | Samples, *, times: bool, phrases: tuple[str, ...] = ()
    ) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each segment as soon as it is known, then the transcript.

        audio: samples, or an open file, which is closed in the end.
        times: whether words are timed.
        phrases: to expect.

        See `Workers.results`.

        Raises:
            ApiError: the file is no audio, or too long.
        """
        close = audio.close if isinstance(audio, IOBase) else lambda: None
        return self._workers.results(partial(self._work, audio, times, phrases), on_end=close)

    async def transcript(
        self, audio: IOBase | Samples, *, times: bool, phrases: tuple[str, ...] = ()
    ) -> Transcript:
        """Return the transcript; raises as `transcribe` does."""
        async with aclosing(self.transcribe(audio, times=times, phrases=phrases)) as results:
            while isinstance(result := await anext(results), str):
                pass
        return result

    async def turns(
        self, phrases: tuple[str, ...], silence: float | None
    ) -> Callable[[int], Session | ClipTurn]:
        """Return a function that makes a turn, given the index of its first sample.

        phrases: to expect.
        silence: seconds that end a turn without a detector.
        """
        streaming = self.streaming
        if streaming is None:
            return partial(ClipTurn, phrases)
        rules = streaming.rules
        if silence is not None and self.detector is None:
            rules = replace(rules, silence=silence)
        decoder = self._bundle.decoder
        if phrases and decoder is not None and decoder.decoder_type != "graph":
            expecting = await asyncio.to_thread(
                lambda: self._streaming(self._bundle.expecting(phrases))
            )
            assert expecting is not None
            streaming = expecting
        return lambda start: Session(streaming, rules, start=start)

    async def advance(self, turn: Session | ClipTurn) -> Sequence[Event]:
        """Process the audio fed to a turn and return its new events.

        A whole-clip turn has events only once it is finished.

        Raises:
            ApiError: a clip is too long.
        """
        if isinstance(turn, Session):
            return await self._sessions.advance(turn)
        if not turn.is_finished:
            return ()
        samples, start = np.concatenate(turn.parts), self._seconds(turn.start)
        transcript = await self.transcript(samples, times=True, phrases=turn.phrases)
        end = start + transcript.seconds
        words = tuple(word.later(start) for word in transcript.words)
        final = Final(seconds=end, text=transcript.text, start=start, end=end, words=words)
        return [final] if transcript.text else ()

    def close(self) -> None:
        """End all threads and processes."""
        self._sessions.close()
        self.batcher.close()
        self._transcriber.close()

    def _work(
        self,
        audio: IOBase | Samples,
        times: bool,
        phrases: tuple[str, ...],
        on_text: Callable[[str], None],
    ) -> Transcript:
        """Transcribe a file or samples, in a thread of the workers."""
        if isinstance(audio, IOBase):
            self._check_seconds(declared_seconds(audio))
        (result,) = self._transcriber.stream(
            [audio],
            self.sample_rate,
            on_seconds=self._counter(),
            on_text=on_text,
            phrases=phrases,
            times=times,
        )
        if isinstance(result, AudioError):
            raise ApiError(422, str(result), "file")
        if isinstance(result, SbkitError):
            raise result
        return result

    def _streaming(self, bundle: OpenBundle) -> StreamingRecognizer | None:
        try:
            return StreamingRecognizer(bundle=bundle)
        except SbkitError:
            return None

    def _counter(self) -> Callable[[float], None]:
        """Return a function that counts seconds of a request; its header may declare too few."""
        total = 0.0

        def count(seconds: float) -> None:
            nonlocal total
            total += seconds
            self._check_seconds(total)
            self._metrics.audio.inc(seconds)

        return count

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self._max_seconds:
            raise too_large(f"{self._max_seconds:g} s of audio")

    def _on_batch(self, clips: int, samples: int) -> None:
        self._metrics.on_batch(clips, clips * self._seconds(samples))

    def _seconds(self, samples: int) -> float:
        return samples_to_seconds(samples, self.sample_rate)

"""A bundle that transcribes the files and turns of many clients, in shared batches.

    segments of many requests -> one queue -> batches of similar length -> the model
        -> the outputs that each request waits for

Segments run in the order of their arrival. A file has no more segments in the queue than the model
runs at a time, so that an hour of audio blocks nobody.
"""

import asyncio
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from sbkit.audio.containers import AudioError
from sbkit.audio.io import Samples, declared_seconds
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.protocols import Encoded
from sbkit.bundle.side_inputs import SideInputs, make_zeros
from sbkit.runtime.batch_shapes import BatchShapes, round_up
from sbkit.runtime.clients import Batcher, Workers
from sbkit.runtime.model_thread import ModelThread
from sbkit.serve.middleware import ApiError, Limits, Metrics, too_large
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.predict import NO_ROW, Channel, Transcriber
from sbkit.tasks.asr.session import (
    DEFAULT_RULES,
    Event,
    Final,
    Session,
    StreamingRecognizer,
    advance_batch,
)
from sbkit.tasks.asr.transcript import Transcript
from sbkit.tasks.vad.predict import VoiceDetector

REQUEST_AHEAD_SECONDS = 60.0  # of audio that a request reads ahead
QueuedSegment = tuple[Samples, SideInputs]
TURN_SILENCE_SECONDS = 0.5  # as in OpenAI's server_vad; endpoint rules wait longer


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
    """Return the transcript at the end of the results of a file or a turn."""
    async with aclosing(results):
        while isinstance(result := await anext(results), str):
            pass
    return result


@dataclass(eq=False, kw_only=True)
class RecognitionService:
    """Transcribe the files and turns of many clients at a time.

    silence: the seconds of silence that end a turn; None if only clients can end turns.
    """

    bundle: AsrBundle[ModelThread]
    shapes: BatchShapes  # a closed grid
    wait_seconds: float  # how long a segment waits for others to share its batch
    limits: Limits
    workers: Workers
    metrics: Metrics
    detector: VoiceDetector | None = None

    def __post_init__(self) -> None:
        model, shapes = self.bundle.model, self.shapes
        self.sample_rate = self.bundle.config.sample_rate
        self.language = self.bundle.config.language
        self.side_fields = self.bundle.task.side_fields
        self.spaces = self.bundle.config.has_words
        self.runs_on = model.runs_on
        self._parallel_samples = model.parallel_batches * shapes.max_samples
        self.segments = Batcher[QueuedSegment, Encoded](
            self._encode_batch,
            size=lambda segment: round_up(len(segment[0]), shapes.padded_lengths),
            max_size=self._parallel_samples,
            wait_seconds=self.wait_seconds,
        )
        self._sessions = Batcher[Session, Sequence[Event]](advance_batch)
        self._transcriber = Transcriber(
            bundle=self.bundle, read_ahead_seconds=REQUEST_AHEAD_SECONDS, encode=self._encode
        )
        self.streaming: StreamingRecognizer | None = None
        with suppress(SbkitError):  # the model cannot run in chunks
            self.streaming = StreamingRecognizer(bundle=self.bundle)
        self.silence = None if self.streaming is None else DEFAULT_RULES.silence
        if self.detector is not None:
            self.detector.require_rate(self.sample_rate)
            self.silence = TURN_SILENCE_SECONDS

    def warm_up(self) -> None:
        """Run every shape of the table, and everything after the model once."""
        if self.bundle.task.decodes_frames:
            side = make_zeros(self.bundle.config.side_shapes)
            self.bundle.model.warm_up(self.shapes, side)
        silence = np.zeros(self.sample_rate, np.int16)
        for times in (False, True) if not self.side_fields else ():
            list(self._transcriber.stream([silence], self.sample_rate, times=times))
        if self.streaming is not None:
            Session(self.streaming).push(silence)
        if self.detector is not None:
            self.detector.speech_segments(silence)

    def transcribe(
        self,
        audio: BinaryIO | Samples,
        *,
        times: bool,
        phrases: tuple[str, ...] = (),
        channel: Channel = None,
        row: Mapping[str, Any] = NO_ROW,
    ) -> AsyncGenerator[str | Transcript]:
        """Yield the text of each segment as soon as it is final, then the transcript.

        audio: samples, or an open file, which is closed in the end.
        times, phrases, channel, row: as for `Transcriber.stream`.
        """

        def work(on_text: Callable[[str], None]) -> Transcript:
            if not isinstance(audio, np.ndarray):
                self._check_seconds(declared_seconds(audio))
            total_seconds = 0.0

            def count_seconds(seconds: float) -> None:
                nonlocal total_seconds
                total_seconds += seconds
                self._check_seconds(total_seconds)  # again: the header may declare too few
                self.metrics.audio.inc(seconds)

            (result,) = self._transcriber.stream(
                [audio],
                self.sample_rate,
                on_seconds=count_seconds,
                on_text=on_text,
                phrases=phrases,
                times=times,
                channel=channel,
                row=row,
            )
            if isinstance(result, AudioError):
                raise ApiError(422, str(result), "file")
            if isinstance(result, SbkitError):
                raise result
            return result

        close = (lambda: None) if isinstance(audio, np.ndarray) else audio.close
        return self.workers.run(work, on_end=close)

    async def turn_factory(
        self, phrases: tuple[str, ...], silence: float | None
    ) -> Callable[[int], Session | ClipTurn]:
        """Return a function that creates a turn, given the index of its first sample.

        silence: ends a turn if there is no detector, in seconds; None if the client ends turns.
        """
        for name in self.side_fields:
            fault = f"A session cannot pass `{name}` to this model beside the audio."
            raise ApiError(400, f"{fault} Send files.", "model")
        streaming = self.streaming
        if streaming is None:
            return partial(ClipTurn, phrases)
        rules = DEFAULT_RULES
        if silence is None:
            rules = replace(rules, max_utterance=self.limits.max_turn_seconds, ends_turns=False)
        elif self.detector is None:
            rules = replace(rules, silence=silence)
        if phrases and self.bundle.decoder is not None:
            streaming = await asyncio.to_thread(
                lambda: StreamingRecognizer(bundle=self.bundle.with_more_hotwords(phrases))
            )
        return lambda start: Session(streaming, rules, offset=start)

    async def advance(self, turn: Session | ClipTurn) -> Sequence[Event]:
        """Process the audio fed to a turn and return its new events.

        A whole-clip turn has events only once it is finished.
        """
        if isinstance(turn, Session):
            return await wrap_future(self._sessions.submit(turn)) if turn.has_work else ()
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
        """End the threads; close the workers first."""
        self._sessions.close()
        self.segments.close()
        self._transcriber.close()

    def _encode_batch(self, segments: Sequence[QueuedSegment]) -> list[Encoded]:
        clips, sides = zip(*segments, strict=True)
        return self.bundle.model.encode_by_length(
            clips, sides if self.side_fields else (), shapes=self.shapes
        )

    def _encode(self, segments: Sequence[Samples], sides: Sequence[SideInputs]) -> list[Encoded]:
        """Run the encoder on segments of a file, with one batch of them at a time in the queue."""
        outputs: list[Encoded] = []
        futures: list[Future[Encoded]] = []
        num_samples = 0
        for segment, side in zip(segments, sides or [{}] * len(segments), strict=True):
            futures.append(self.segments.submit((segment, side)))
            num_samples += len(segment)
            if num_samples >= self._parallel_samples:
                outputs += [future.result() for future in futures]
                futures, num_samples = [], 0
        return outputs + [future.result() for future in futures]

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self.limits.max_seconds:
            raise too_large(f"{self.limits.max_seconds:g} s of audio")

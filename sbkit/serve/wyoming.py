"""Home Assistant's protocol, Wyoming: recognition and speech over TCP (package `wyoming`).

A client sends a clip in blocks, and gets its text: a live model sends it word by word before. The
protocol has no keys. A connection counts as a session, and its speech as a request.
"""

import asyncio
import socket
import time
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStart, TranscriptStop
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_read_event, async_write_event
from wyoming.info import AsrModel, AsrProgram, Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.tts import Synthesize

from sbkit.audio.encode import FILE_RATE
from sbkit.audio.io import END, FULL_SCALE, Resampler, Samples, to_int16
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import __version__
from sbkit.serve.api import Fields, SpeechFields, TranscriptionOptions, parse_fields
from sbkit.serve.app import Service
from sbkit.serve.middleware import ApiError, as_api_error, logger, too_large
from sbkit.serve.realtime import Item
from sbkit.serve.recognition import ClipTurn, RecognitionService
from sbkit.serve.tts import Voice
from sbkit.tasks.recognition.session import Final, Partial, Session

MAX_EVENT_BYTES = 1 << 20  # of JSON, and of a block of audio
ABOUT: dict[str, Any] = {  # what the protocol asks of every program and model
    "attribution": Attribution(name="sbkit", url=""),
    "installed": True,
    "description": None,
    "version": __version__,
}


class AudioBlock(Fields):
    """The format of a block: 16 bits, with channels that are averaged."""

    without_effect = ("timestamp",)
    rate: Annotated[int, Field(ge=4000, le=384_000)]
    width: Literal[2]  # bytes of a sample
    channels: Annotated[int, Field(ge=1, le=32)]


class BoundedReader(StreamReader):
    """A stream whose events are of a bounded size: a longer one ends the connection."""

    async def readexactly(self, n: int) -> bytes:
        """Read bytes; raises ValueError if they are too many."""
        if n > MAX_EVENT_BYTES:
            raise ValueError(f"An event has more than {MAX_EVENT_BYTES} bytes.")
        return await super().readexactly(n)


@asynccontextmanager
async def listen(service: Service, listening: socket.socket) -> AsyncIterator[None]:
    """Answer clients until the end of the block."""
    connections: set[asyncio.Task[None]] = set()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            connections.add(task)
            task.add_done_callback(connections.discard)
        await Connection(service, reader, writer).run()

    def protocol() -> StreamReaderProtocol:
        return StreamReaderProtocol(BoundedReader(limit=MAX_EVENT_BYTES), answer)

    server = await asyncio.get_running_loop().create_server(protocol, sock=listening)
    try:
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()


class Connection:
    """A client's connection, with one clip at a time."""

    def __init__(self, service: Service, reader: StreamReader, writer: StreamWriter) -> None:
        self._service = service
        self._reader = reader
        self._writer = writer
        self._options = TranscriptionOptions()
        self._clip: Clip | None = None

    async def run(self) -> None:
        """Answer events until the client leaves, or sends none for too long."""
        try:
            with self._service.open_session():
                while (event := await self._read()) is not None:
                    await self._answer_or_fail(event)
        except (ConnectionError, EOFError, TimeoutError):
            pass
        except ApiError as error:  # too many sessions
            await self._send(Error(text=str(error)))
        finally:
            self._writer.close()

    async def _answer_or_fail(self, event: Event) -> None:
        try:
            await self._answer(event)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self._clip = None
            await self._send(Error(text=str(as_api_error(error))))

    async def _read(self) -> Event | None:
        """Return the next event; None at the end, and for anything else than an event."""
        async with asyncio.timeout(self._service.limits.answer_seconds):
            with suppress(AttributeError, TypeError, KeyError):  # JSON without its fields
                return await async_read_event(self._reader)
        return None

    async def _send(self, event: Eventable) -> None:
        async with asyncio.timeout(self._service.limits.answer_seconds):
            await async_write_event(event.event(), self._writer)

    async def _answer(self, event: Event) -> None:
        """Answer an event; those of other services have none."""
        start = time.perf_counter()
        if Describe.is_type(event.type):
            await self._send(describe(self._service))
        elif Transcribe.is_type(event.type):
            request = Transcribe.from_event(event)
            terms = [*(request.transcript_names or ()), *(request.transcript_terms or ())]
            fields = {"model": request.name, "language": request.language, "keywords": terms}
            self._options = parse_fields(TranscriptionOptions, fields)
        elif AudioStart.is_type(event.type):
            self._clip = await self._begin_clip()
        elif AudioChunk.is_type(event.type) and self._clip is not None:
            text = await self._clip.feed(parse_fields(AudioBlock, event.data), event.payload or b"")
            await self._send_chunk(self._clip, text)
        elif AudioStop.is_type(event.type) and self._clip is not None:
            clip, self._clip = self._clip, None
            await self._send_chunk(clip, await clip.finish())
            await self._send(Transcript(text=clip.item.text(), language=clip.recognizer.language))
            if clip.is_announced:
                await self._send(TranscriptStop())
            _log("transcript", start, clip.seconds)
        elif Synthesize.is_type(event.type):
            _log("speech", start, await self._speak(Synthesize.from_event(event)))

    async def _begin_clip(self) -> "Clip":
        options = self._options
        recognizer = self._service.models.pick_recognizer(options)
        make_turn = await recognizer.turns(options.phrases, None)
        max_seconds = self._service.limits.max_turn(recognizer.sample_rate)
        return Clip(recognizer, make_turn(0), max_seconds)

    async def _send_chunk(self, clip: "Clip", text: str) -> None:
        """Send text that will hardly change."""
        if text and clip.recognizer.streaming is not None:
            if not clip.is_announced:
                await self._send(TranscriptStart(language=clip.recognizer.language))
                clip.is_announced = True
            await self._send(TranscriptChunk(text=text))

    async def _speak(self, request: Synthesize) -> float:
        """Send the speech of a text; return its seconds."""
        fields = parse_fields(SpeechFields, {"input": request.text})
        name = (request.voice and request.voice.name) or ""
        voice = self._service.models.pick_voice(name, None)
        audio = {"rate": FILE_RATE, "width": 2, "channels": 1}
        seconds = 0.0
        with self._service.open_request():
            await self._send(AudioStart(**audio))
            async with aclosing(voice.speak(fields.input, fields.speed, "pcm")) as parts:
                async for part in parts:
                    if isinstance(part, bytes):
                        await self._send(AudioChunk(audio=part, **audio))
                    elif isinstance(part, float):
                        seconds = part
            await self._send(AudioStop())
        return seconds


@dataclass
class Clip:
    """A clip that arrives in blocks."""

    recognizer: RecognitionService
    turn: Session | ClipTurn
    max_seconds: float
    item: Item = field(default_factory=lambda: Item(0.0))
    seconds: float = 0.0
    is_announced: bool = False  # whether the client has got a part of its text
    resampler: Resampler | None = None  # from the rate of the first block

    async def feed(self, block: AudioBlock, content: bytes) -> str:
        """Process a block of audio; return the new text that will hardly change."""
        values = np.frombuffer(
            content[: len(content) // (2 * block.channels) * 2 * block.channels], "<i2"
        )
        signal = values.reshape(-1, block.channels).mean(axis=1, dtype=np.float32) / FULL_SCALE
        self.seconds += samples_to_seconds(len(signal), block.rate)
        if self.seconds > self.max_seconds:
            raise too_large(f"{self.max_seconds:g} s of audio", "audio")
        if self.resampler is None:
            self.resampler = Resampler(block.rate, self.recognizer.sample_rate)
        return await self._advance(to_int16(self.resampler.push(signal)))

    async def finish(self) -> str:
        """Process the end of the clip; return the text that its chunks lack."""
        if self.resampler is None:
            return ""
        return await self._advance(to_int16(self.resampler.push(END, is_last=True)), is_last=True)

    async def _advance(self, samples: Samples, *, is_last: bool = False) -> str:
        self.turn.feed(samples)
        self.turn.is_finished = is_last
        events = await self.recognizer.advance(self.turn)
        heard = (event for event in events if isinstance(event, Final | Partial))
        return "".join(self.item.hear(event)[1] for event in heard)


def describe(service: Service) -> Info:
    """Describe the recognizers and the voices."""
    recognizers, voices = service.models.engines(RecognitionService), service.models.engines(Voice)
    models = [
        AsrModel(name=name, languages=[recognizer.language or "und"], **ABOUT)
        for name, recognizer in recognizers.items()
    ]
    speakers = [
        TtsVoice(name=name, languages=[voice.language or "und"], **ABOUT)
        for name, voice in voices.items()
    ]
    is_live = any(recognizer.streaming is not None for recognizer in recognizers.values())
    asr = AsrProgram(name="sbkit", models=models, supports_transcript_streaming=is_live, **ABOUT)
    tts = TtsProgram(name="sbkit", voices=speakers, **ABOUT)
    return Info(asr=[asr] if models else [], tts=[tts] if speakers else [])


def _log(answer: str, start: float, audio_seconds: float) -> None:
    seconds = time.perf_counter() - start
    logger.info("wyoming %s %.3f s, %.1f s of audio", answer, seconds, audio_seconds)

"""Home Assistant's protocol, Wyoming: recognition and speech over TCP (package `wyoming`).

A client sends a clip in blocks and gets its text. A live model also sends the text word by word,
before the clip ends. The protocol has no keys. A connection counts as a session, and its speech as
a request. An error ends it, because Home Assistant skips the message and would wait.
"""

import asyncio
import socket
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Mapping
from contextlib import aclosing, closing, suppress
from time import monotonic
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
from pydantic import Field
from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStart, TranscriptStop
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_read_event, async_write_event
from wyoming.info import AsrModel, AsrProgram, Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.ping import Ping, Pong
from wyoming.tts import Synthesize, SynthesizeVoice

from sbkit.audio.encode import FILE_RATE
from sbkit.audio.io import FULL_SCALE, NO_SIGNAL, Resampler, Samples, to_int16
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import __version__
from sbkit.serve.api import Fields, SpeechFields, TranscriptionOptions, parse_fields
from sbkit.serve.app import Service
from sbkit.serve.middleware import ApiError, as_api_error, logger, too_large, wrong_field
from sbkit.serve.realtime import Item
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.tts import Voice
from sbkit.tasks.asr.session import Final, Partial
from sbkit.text.languages import language_code

MAX_EVENT_BYTES = 1 << 20  # of JSON, and of a block of audio
DISCARD_SECONDS = 10.0  # after an error, for what the client still sends
ABOUT: dict[str, Any] = {  # the protocol requires these of every program and model
    "attribution": Attribution(name="sbkit", url=""),
    "installed": True,
    "description": None,
    "version": __version__,
}
Request = TypeVar("Request", bound=Eventable)
SPEECH_FORMAT = {"rate": FILE_RATE, "width": 2, "channels": 1}


class AudioBlock(Fields, extra="ignore"):
    """The format of a block: 16 bits, with channels that are averaged."""

    rate: Annotated[int, Field(ge=4000, le=384_000)]
    width: Literal[2]  # bytes of a sample
    channels: Annotated[int, Field(ge=1, le=32)]


class BoundedReader(StreamReader):
    """A stream that limits the size of events: a larger one ends the connection."""

    async def readexactly(self, n: int) -> bytes:
        """Read n bytes; raises ValueError for more than MAX_EVENT_BYTES."""
        if n > MAX_EVENT_BYTES:
            raise ValueError(f"An event has more than {MAX_EVENT_BYTES} bytes.")
        return await super().readexactly(n)


async def listen(service: Service, listener: socket.socket) -> asyncio.Server:
    """Accept clients until the returned server is closed."""

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await Connection(service, reader, writer).run()

    def make_protocol() -> StreamReaderProtocol:
        return StreamReaderProtocol(BoundedReader(limit=MAX_EVENT_BYTES), answer)

    return await asyncio.get_running_loop().create_server(make_protocol, sock=listener)


class Connection:
    """A client's connection, with one clip at a time."""

    def __init__(self, service: Service, reader: StreamReader, writer: StreamWriter) -> None:
        self._service = service
        self._reader = reader
        self._writer = writer
        self._deadline = monotonic() + service.limits.max_session_seconds
        self._options = TranscriptionOptions()
        self._item: Item | None = None  # the clip, once it has begun

    async def run(self) -> None:
        """Answer events until the client leaves, a limit is reached, or an answer fails."""
        with closing(self._writer), suppress(ConnectionError, EOFError, TimeoutError):
            try:
                with self._service.open_session():
                    while (event := await self._read()) is not None:
                        await self._answer(event)
            except (ConnectionError, EOFError, TimeoutError):
                raise
            except Exception as error:
                answer = as_api_error(error)
                # A message about a field may quote what somebody said.
                logger.info("wyoming error %d: %s", answer.status, answer.param or answer)
                await self._send(Error(text=str(answer)))
                await self._discard_rest()

    async def _discard_rest(self) -> None:
        """Read what the client still sends: closed before, the connection would lose the error."""
        self._writer.write_eof()
        async with asyncio.timeout(DISCARD_SECONDS):
            while await self._reader.read(MAX_EVENT_BYTES):
                pass

    async def _read(self) -> Event | None:
        """Return the next event; None at the end, and for anything else than an event."""
        timeout = min(self._service.limits.answer_seconds, self._deadline - monotonic())
        async with asyncio.timeout(timeout):
            with suppress(AttributeError, TypeError, KeyError, RecursionError):  # other JSON
                return await async_read_event(self._reader)
        return None

    async def _send(self, event: Eventable) -> None:
        async with asyncio.timeout(self._service.limits.answer_seconds):
            await async_write_event(event.event(), self._writer)

    async def _answer(self, event: Event) -> None:
        """Answer an event, unless it is for another service. Raises ApiError."""
        if Ping.is_type(event.type):
            await self._send(Pong(text=Ping.from_event(event).text))
        elif Describe.is_type(event.type):
            await self._send(describe(self._service))
        elif Transcribe.is_type(event.type):
            self._options = read_options(self._service, parse(Transcribe, event))
        elif AudioStart.is_type(event.type):
            await self._begin_clip()
        elif AudioChunk.is_type(event.type) and self._item is not None:
            await self._feed(parse_fields(AudioBlock, event.data), event.payload or b"")
        elif AudioStop.is_type(event.type) and self._item is not None:
            await self._end_clip(self._item)
        elif Synthesize.is_type(event.type):
            await self._speak(parse(Synthesize, event))

    async def _begin_clip(self) -> None:
        self._recognizer = self._service.models.pick_recognizer(self._options)
        self._turn = (await self._recognizer.turn_factory(self._options.phrases, None))(0)
        self._item = Item(0.0, self._recognizer.spaces)
        self._seconds = 0.0
        self._incomplete = b""  # the start of a sample, or of one of all channels
        self._resampler: Resampler | None = None  # from the rate of the first block

    async def _feed(self, block: AudioBlock, content: bytes) -> None:
        content = self._incomplete + content
        num_values = len(content) // (2 * block.channels) * block.channels
        self._incomplete = content[2 * num_values :]
        values = np.frombuffer(content, "<i2", num_values).reshape(-1, block.channels)
        signal = values.mean(axis=1, dtype=np.float32) / FULL_SCALE
        self._seconds += samples_to_seconds(len(signal), block.rate)
        max_seconds = self._service.limits.max_turn(self._recognizer.sample_rate)
        if self._seconds > max_seconds:
            raise too_large(f"{max_seconds:g} s of audio", "audio")
        if self._resampler is None:
            self._resampler = Resampler(block.rate, self._recognizer.sample_rate)
        await self._advance(to_int16(self._resampler.push(signal)))

    async def _end_clip(self, item: Item) -> None:
        if self._resampler is not None:
            last_samples = to_int16(self._resampler.push(NO_SIGNAL, is_last=True))
            await self._advance(last_samples, is_last=True)
        await self._send(Transcript(text=item.text(), language=self._recognizer.language))
        if item.is_announced:
            await self._send(TranscriptStop())
        logger.info("wyoming transcript, %.1f s of audio", self._seconds)
        self._item = None

    async def _advance(self, samples: Samples, *, is_last: bool = False) -> None:
        """Process samples of the clip; if the model is live, send its new stable text."""
        assert self._item is not None
        recognizer = self._recognizer
        if recognizer.streaming is not None:  # otherwise the clip is counted as a file
            seconds = samples_to_seconds(len(samples), recognizer.sample_rate)
            self._service.metrics.audio.inc(seconds)
        self._turn.feed(samples)
        self._turn.is_finished = is_last
        for event in await recognizer.advance(self._turn):
            text = self._item.add(event)[1] if isinstance(event, Final | Partial) else ""
            if text and recognizer.streaming is not None:
                if not self._item.is_announced:
                    await self._send(TranscriptStart(language=recognizer.language))
                    self._item.is_announced = True
                await self._send(TranscriptChunk(text=text))

    async def _speak(self, request: Synthesize) -> None:
        fields = parse_fields(SpeechFields, {"input": request.text})
        requested = request.voice or SynthesizeVoice()
        voices = self._service.models.engines(Voice)
        name = requested.name or name_for(voices, requested.language)
        if requested.language and not name:
            raise wrong_field("language", "the language of a voice", requested.language)
        voice = self._service.models.pick_voice(name, None)
        speech = voice.speak(fields.input, fields.speed, "pcm")
        with self._service.open_request():
            async with aclosing(speech):
                await anext(speech)  # its notes: the protocol has no field for them
                await self._send(AudioStart(**SPEECH_FORMAT))
                async for chunk in speech:
                    if isinstance(chunk, bytes):
                        await self._send(AudioChunk(audio=chunk, **SPEECH_FORMAT))
            await self._send(AudioStop())
        logger.info("wyoming speech, %.1f s of audio", chunk)  # the last item is its seconds


def parse(event_class: type[Request], event: Event) -> Request:
    """Read a request; raises ApiError if it lacks a field."""
    try:
        return cast("Request", event_class.from_event(event))
    except (AttributeError, KeyError, TypeError):
        raise ApiError(400, f"The event {event.type} lacks a field.") from None


def read_options(service: Service, request: Transcribe) -> TranscriptionOptions:
    """Read the options of transcribing a clip; raises ApiError."""
    name = request.name or name_for(service.models.engines(RecognitionService), request.language)
    terms = [*(request.transcript_names or ()), *(request.transcript_terms or ())]
    fields = {"model": name, "language": request.language, "keywords": terms}
    return parse_fields(TranscriptionOptions, fields)


def name_for(engines: Mapping[str, RecognitionService | Voice], language: str | None) -> str:
    """Return the name of the first model for a language; "" if there is none, or no language.

    A model whose language is und (undetermined) is for all languages.
    """
    codes = {language_code(language), "und"} if language else set()
    for name, engine in engines.items():
        if language_code(engine.language or "und") in codes:
            return name
    return ""


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

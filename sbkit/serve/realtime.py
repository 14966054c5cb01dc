"""Realtime transcription over a WebSocket, with the events of OpenAI's API.

    audio in base64 -> samples at the model's rate -> the text of a turn -> deltas and a transcript

A turn ends when the client commits it, when a detector finds the end of its speech, or, without a
detector, at an endpoint of the streaming session.
"""

import asyncio
import io
import json
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from uuid import uuid4

import soundfile
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.audio.decode import Signal
from sbkit.audio.io import NO_SIGNAL, Resampler, Samples, to_int16
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.serve.api import (
    AudioInput,
    ClientEvent,
    ServedModels,
    SessionFields,
    parse_fields,
    parse_object,
    words_of,
)
from sbkit.serve.middleware import (
    ApiError,
    Json,
    JsonObject,
    Limits,
    Metrics,
    as_api_error,
    request_facts,
    too_large,
    wrong_field,
)
from sbkit.serve.recognition import RecognitionService
from sbkit.tasks.asr.session import Endpoint, Event, Final, Partial
from sbkit.tasks.vad.turns import NO_SAMPLES, SpeechTurns
from sbkit.text.normalization import join_segments

BLOCK_BYTES = 24_000  # decoded at a time, so that other sessions run during a long message
MIN_TURN_SECONDS = 0.1  # of a turn that a client commits
SUBPROTOCOL = "realtime"  # one of the subprotocols that browsers offer
# Base64 as browsers and URLs write it: with line breaks, other characters for + and /, unpadded.
BASE64_VARIANTS = str.maketrans("-_", "+/", " \t\r\n=")
BUFFER, TRANSCRIPTION = "input_audio_buffer", "conversation.item.input_audio_transcription"
GOING_AWAY, INTERNAL_ERROR = 1001, 1011  # WebSocket close codes


@dataclass
class Item:
    """A turn as the client sees it: an item of the conversation."""

    begin: float  # in seconds of the session
    spaces: bool  # between utterances; see `join_segments`
    finals: list[Final] = field(default_factory=list)  # the turn's finished utterances
    delta_text: str = ""  # the text of all deltas
    is_announced: bool = False  # whether the client knows that speech has started
    reason: dict[str, str] = field(default_factory=dict)  # for its end, if the server cut it
    id: str = field(default_factory=lambda: f"item_{uuid4().hex}")

    def text(self, partial: str = "") -> str:
        """Return the text of the finished utterances and the ``partial`` text of the next one."""
        texts = [*(final.text for final in self.finals), partial]
        return join_segments(texts, spaces=self.spaces)

    def add(self, event: Partial | Final) -> tuple[str, str]:
        """Add an event; return the whole text so far, and the new part of its stable text."""
        if isinstance(event, Final):
            self.finals.append(event)
            text = stable = self.text()
        else:
            stable_words = event.text.split()[: event.stable]
            text, stable = self.text(event.text), self.text(" ".join(stable_words))
        delta = stable[len(self.delta_text) :] if stable.startswith(self.delta_text) else ""
        self.delta_text += delta
        return text, delta


@dataclass(eq=False)
class RealtimeSession:
    """A client's session; its times are in seconds from the first sample."""

    socket: WebSocket  # not yet accepted
    models: ServedModels
    limits: Limits
    metrics: Metrics

    def __post_init__(self) -> None:
        self._options = AudioInput()
        self._id = f"sess_{uuid4().hex}"
        self._now = 0.0
        self._deadline = monotonic() + self.limits.max_session_seconds
        self._last_item: str | None = None

    async def run(self) -> None:
        """Answer the client's events until it leaves, or a limit is reached.

        At a limit, the audio of the open turn is transcribed first.
        """
        subprotocols = self.socket.scope["subprotocols"]
        await self.socket.accept(SUBPROTOCOL if SUBPROTOCOL in subprotocols else None)
        try:
            await self._configure(self._options)
            await self._send("session.created", session=self._plain())
            while (message := await self._receive()) is not None:
                await self._answer(message)
            if self._in_turn:
                with suppress(ApiError):  # too short
                    await self._commit()
            await self.socket.close(GOING_AWAY, "The session was silent or too long.")
        except WebSocketDisconnect:
            pass
        except Exception as error:
            with suppress(WebSocketDisconnect):
                await self._fail(error)
                await self.socket.close(
                    INTERNAL_ERROR, "Internal server error; see the server log."
                )
        finally:
            request_facts.get()["audio_seconds"] = self._now

    async def _receive(self) -> Message | None:
        """Return the client's next message, or None if a limit is reached."""
        timeout = min(self.limits.answer_seconds, self._deadline - monotonic())
        try:
            async with asyncio.timeout(timeout):
                message = await self.socket.receive()
        except TimeoutError:
            return None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        return message

    async def _answer(self, message: Message) -> None:
        event_id: Json = None
        try:
            if (text := message.get("text")) is None:
                expected = "JSON in a text frame"
                raise wrong_field("message", expected, "binary; append audio in base64")
            fields = parse_object(text)
            event_id = fields.pop("event_id", None)
            event = parse_fields(ClientEvent, fields)
            match event.type:
                case "session.update":
                    session = parse_fields(SessionFields, event.session)
                    await self._update(session.audio.input)
                case "input_audio_buffer.append":
                    await self._append(event.audio)
                case "input_audio_buffer.commit":
                    await self._commit()
                case "input_audio_buffer.clear":
                    self._begin_stream()
                    await self._send(f"{BUFFER}.cleared")
        except ApiError as error:
            await self._fail(error, event_id)

    async def _update(self, options: AudioInput) -> None:
        if self._in_turn:
            message = "A session cannot change within a turn. Commit or clear the audio first."
            raise ApiError(400, message, "session.update")
        changes = {name: getattr(options, name) for name in options.model_fields_set}
        await self._configure(self._options.model_copy(update=changes))
        await self._send("session.updated", session=self._plain())

    async def _configure(self, options: AudioInput) -> None:
        first, *_ = self.models.engines(RecognitionService)
        model = self.socket.query_params.get("model") or first
        self._recognizer = options.choose_recognizer(self.models, model)
        self._options = options
        self._rate = self._recognizer.sample_rate
        phrases = options.transcription.phrases
        self._make_turn = await self._recognizer.turn_factory(phrases, options.silence_seconds)
        self._begin_stream()

    def _begin_stream(self) -> None:
        detector = self._recognizer.detector
        silence = self._options.silence_seconds
        self._half_sample = b""  # the byte of a sample whose other byte is still to come
        self._resampler = Resampler(self._options.encoding.rate, self._rate)
        self._speech_turns: SpeechTurns | None = None
        if detector is not None and silence is not None:
            self._speech_turns = SpeechTurns(detector, silence=silence, start=self._now)
        self._begin_turn(self._now)

    def _begin_turn(self, begin: float) -> None:
        self._turn = self._make_turn(seconds_to_samples(begin, self._rate))
        self._begin_item(begin)  # not rounded to samples: a later time means new audio

    def _begin_item(self, begin: float) -> None:
        self._item = Item(begin, self._recognizer.spaces)

    async def _append(self, audio: str) -> None:
        try:
            audio = audio.translate(BASE64_VARIANTS)
            content = b64decode(audio + "=" * (-len(audio) % 4), validate=True)
        except ValueError:
            raise wrong_field("audio", "base64", "not") from None
        subtype, rate, sample_bytes = self._options.encoding
        content = self._half_sample + content
        num_bytes = len(content) - len(content) % sample_bytes  # of whole samples
        content, self._half_sample = content[:num_bytes], content[num_bytes:]
        format = {"format": "RAW", "subtype": subtype, "samplerate": rate, "channels": 1}
        max_seconds = self.limits.max_turn(self._rate)
        for start in range(0, len(content), BLOCK_BYTES):
            if self._now - self._item.begin > max_seconds:
                raise too_large(f"{max_seconds:g} s of audio in a turn", "audio")
            block = io.BytesIO(content[start : start + BLOCK_BYTES])
            await self._push(soundfile.read(block, dtype="float32", **format)[0])
            await asyncio.sleep(0)  # lets other sessions run

    async def _push(self, signal: Signal) -> None:
        samples = to_int16(self._resampler.push(signal))
        self._now += samples_to_seconds(len(signal), self._options.encoding.rate)
        if self._speech_turns is None:
            await self._feed(samples)
            return
        for block in await asyncio.to_thread(self._speech_turns.push, samples):
            if block.speech_start is not None:
                self._begin_turn(samples_to_seconds(block.start, self._rate))
                await self._announce_start(block.speech_start)
            await self._feed(block.samples)
            if block.speech_end is not None:
                await self._finish(block.speech_end)
        if not self._item.is_announced:
            self._item.begin = self._now

    async def _feed(self, samples: Samples, *, is_last: bool = False) -> None:
        """Process samples of the turn, and send its new events."""
        if self._recognizer.streaming is not None:  # otherwise the turn is counted as a file
            self.metrics.audio.inc(samples_to_seconds(len(samples), self._rate))
        self._turn.feed(samples)
        self._turn.is_finished = is_last
        for event in await self._recognizer.advance(self._turn):
            await self._send_event(event, is_last=is_last)

    async def _send_event(self, event: Event, *, is_last: bool) -> None:
        """Send the new text of an event; a Final ends the turn if endpoint rules end turns."""
        item = self._item
        has_detector = self._speech_turns is not None
        has_rules = self._options.silence_seconds is not None and not has_detector and not is_last
        match event:
            case Final() | Partial():
                text, delta = item.add(event)
            case Endpoint(rule="nothing") if has_rules:
                item.begin = event.seconds
                return
            case Endpoint(rule="longest") if self._options.silence_seconds is None and not is_last:
                item.reason = {"reason": "max_turn_seconds"}
                return
            case _:
                return
        if text and has_rules and not item.is_announced:
            await self._announce_start(event.seconds)
        await self._send_text("delta", delta=delta, hypothesis=text)
        if isinstance(event, Final) and (has_rules or (item.reason and not is_last)):
            await self._announce_end(event.end)
            await self._complete(event.end)

    async def _announce_start(self, begin: float) -> None:
        self._item.is_announced = True
        ms = round(1000 * begin)
        await self._send(f"{BUFFER}.speech_started", item_id=self._item.id, audio_start_ms=ms)

    async def _commit(self) -> None:
        """End the turn and its stream."""
        if round(self._now - self._item.begin, 6) < MIN_TURN_SECONDS:
            message = f"The turn has less than {MIN_TURN_SECONDS:g} s of audio. Append more."
            raise ApiError(400, message, code="input_audio_buffer_commit_empty")
        samples = to_int16(self._resampler.push(NO_SIGNAL, is_last=True))
        await self._finish(self._now, samples)
        self._begin_stream()

    async def _finish(self, end: float, samples: Samples = NO_SAMPLES) -> None:
        """End the turn, whose speech ended at ``end``, and process its last samples."""
        await self._announce_end(end)
        try:
            await self._feed(samples, is_last=True)
        except SbkitError as error:
            await self._send_text("failed", error=as_api_error(error).plain()["error"])
            self._begin_item(self._now)
        else:
            await self._complete(self._now)

    async def _announce_end(self, end: float) -> None:
        item = self._item
        if item.is_announced:
            ms = round(1000 * end)
            await self._send(f"{BUFFER}.speech_stopped", item_id=item.id, audio_end_ms=ms)
        ids = {"item_id": item.id, "previous_item_id": self._last_item}
        self._last_item = item.id
        await self._send(f"{BUFFER}.committed", **ids, **item.reason)

    async def _complete(self, end: float) -> None:
        """Send the transcript of the turn, and start to wait for the next turn."""
        item = self._item
        await self._send_text(
            "completed",
            transcript=item.text(),
            usage={"type": "duration", "seconds": round(end - item.begin, 3)},
            words=words_of([word for final in item.finals for word in final.words]),
            **item.reason,
        )
        self._begin_item(end)

    async def _fail(self, error: Exception, event_id: object = None) -> None:
        content = as_api_error(error).plain()["error"]
        await self._send("error", error={**content, "event_id": event_id})

    async def _send_text(self, kind: str, **content: Json) -> None:
        item = {"item_id": self._item.id, "content_index": 0}
        await self._send(f"{TRANSCRIPTION}.{kind}", **item, **content)

    async def _send(self, kind: str, **content: Json) -> None:
        """Send an event; raises WebSocketDisconnect if the connection is closed."""
        event = {"type": kind, "event_id": f"event_{uuid4().hex}", **content}
        try:
            await self.socket.send_text(json.dumps(event))  # in ASCII: UTF-8 has no lone surrogates
        except RuntimeError:  # uvicorn has just closed it, as after too large a message
            raise WebSocketDisconnect from None

    def _plain(self) -> JsonObject:
        return {
            "id": self._id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": self._options.model_dump()},
        }

    @property
    def _in_turn(self) -> bool:
        by_client = self._options.silence_seconds is None
        return self._item.is_announced or (by_client and self._now > self._item.begin)

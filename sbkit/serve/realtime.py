"""Realtime transcription over a WebSocket, with the events of OpenAI's API.

    audio in base64 -> samples at the model's rate -> what is said in a turn -> deltas, a transcript

A turn ends where the client commits it, where a detector finds the end of its speech, or without
one at an endpoint of the live session.
"""

import asyncio
import io
import json
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

import numpy as np
import soundfile
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.audio.io import Samples, to_int16
from sbkit.audio.resample import END, Resampler, Signal
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.serve.errors import ApiError, as_api_error, too_large
from sbkit.serve.fields import take, wrong_field
from sbkit.serve.limits import Limits, State
from sbkit.serve.metrics import Metrics, noted
from sbkit.serve.models import Models
from sbkit.serve.options import Options
from sbkit.serve.recognizer import Recognizer
from sbkit.streaming.session import Endpoint, Event, Final, Partial
from sbkit.text.normalization import join_segments

BLOCK = 24_000  # bytes that are decoded at a time, so that a long message lets others pass
SHORTEST = 0.1  # seconds of a turn that a client commits
PROTOCOL = "realtime"  # of those that a browser offers
BUFFER, TRANSCRIPTION = "input_audio_buffer", "conversation.item.input_audio_transcription"
GOING_AWAY, FAILED = 1001, 1011  # codes of closing
NOTHING = np.zeros(0, np.int16)


@dataclass
class Item:
    """What a client knows of a turn.

    begin: in seconds of the session; shown: all deltas; is_open: whether its speech was announced.
    """

    begin: float
    finals: list[Final] = field(default_factory=list)
    shown: str = ""
    is_open: bool = False
    id: str = field(default_factory=lambda: f"item_{uuid4().hex}")

    def text(self, more: str = "") -> str:
        """Return the text of all that ended in it, and of what goes on."""
        return join_segments([*(each.text for each in self.finals), more])


class RealtimeSession:
    """The session of a client; times are in seconds from its first sample."""

    def __init__(
        self,
        socket: WebSocket,
        *,
        models: Models,
        limits: Limits,
        state: State,
        metrics: Metrics,
    ) -> None:
        """Take a WebSocket that is not accepted yet."""
        self._socket, self._models, self._limits = socket, models, limits
        self._metrics, self._id = metrics, f"sess_{uuid4().hex}"
        self._stopping = asyncio.ensure_future(state.stopping.wait())
        self._now = 0.0
        self._until = monotonic() + limits.max_session_seconds
        self._last_item: str | None = None

    async def run(self) -> None:
        """Answer the client's events until it leaves or the server stops, or one of its limits.

        What it has sent of a turn until then is transcribed.
        """
        offered = self._socket.scope["subprotocols"]
        await self._socket.accept(PROTOCOL if PROTOCOL in offered else None)
        try:
            await self._choose({})
            await self._send("session.created", session=self._plain())
            while (message := await self._receive()) is not None:
                await self._answer(message)
            if self._is_heard:
                with suppress(ApiError):  # too short
                    await self._commit()
            await self._socket.close(
                GOING_AWAY, "The server stops, or this was too long, or silent."
            )
        except WebSocketDisconnect:
            pass
        except Exception as error:
            with suppress(WebSocketDisconnect):
                await self._fail(error)
                await self._socket.close(FAILED, "The server failed; its log says why.")
            raise
        finally:
            self._stopping.cancel()
            noted.get()["audio_seconds"] = self._now

    async def _receive(self) -> Message | None:
        """Return what the client sends next, None where it is not waited for any longer."""
        coming = asyncio.ensure_future(self._socket.receive())
        most = min(self._limits.answer_seconds, self._until - monotonic())
        either = asyncio.FIRST_COMPLETED
        try:
            if most > 0:
                await asyncio.wait((coming, self._stopping), timeout=most, return_when=either)
        finally:
            coming.cancel()  # unless it is done
        if not coming.done():
            return None
        if coming.result()["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        return coming.result()

    async def _answer(self, message: Message) -> None:
        event: dict[str, Any] = {}
        try:
            event = _parse(message)
            match take(event, "type", str):
                case "session.update":
                    await self._update(take(event, "session", dict))
                case "input_audio_buffer.append":
                    await self._append(take(event, "audio", str))
                case "input_audio_buffer.commit":
                    await self._commit()
                case "input_audio_buffer.clear":
                    self._begin()
                    await self._send(f"{BUFFER}.cleared")
                case other:
                    raise wrong_field("type", "an event of transcription sessions", other)
        except ApiError as error:
            await self._fail(error, event.get("event_id"))

    async def _update(self, session: dict[str, Any]) -> None:
        if (kind := take(session, "type", str) or "transcription") != "transcription":
            raise wrong_field("type", "transcription", kind)
        if self._is_heard:
            must = "between turns: commit or clear the audio first"
            raise wrong_field("session.update", must, "within one")
        given = take(take(session, "audio", dict), "input", dict)
        await self._choose({**self._options.plain, **given})
        await self._send("session.updated", session=self._plain())

    async def _choose(self, given: dict[str, Any]) -> None:
        model = self._socket.query_params.get("model") or self._models.names_of(Recognizer)[0]
        self._options = options = Options.parse(given, self._models, model)
        self._recognizer, self._rate = options.recognizer, options.recognizer.sample_rate
        self._turn = await self._recognizer.turns(options.phrases, options.silence)
        self._begin()

    def _begin(self) -> None:
        """Begin a stream, and a turn."""
        self._resampler = Resampler(self._options.format[1], self._rate)
        self._cutter = self._recognizer.speech_turns(self._options.silence, self._now)
        self._start(seconds_to_samples(self._now, self._rate))

    def _start(self, place: int) -> None:
        """Begin a turn with some sample of the session."""
        self._heard, self._item = self._turn(place), Item(samples_to_seconds(place, self._rate))

    async def _append(self, audio: str) -> None:
        try:
            content = b64decode(audio, validate=True)
        except ValueError:
            raise wrong_field("audio", "base64", "not") from None
        subtype, rate, width = self._options.format
        if len(content) % width:
            raise wrong_field("audio", "of whole samples of 16 bits", f"{len(content)} bytes")
        kind = {"format": "RAW", "subtype": subtype, "samplerate": rate, "channels": 1}
        most = min(self._limits.max_seconds, self._limits.max_bytes / 2 / self._rate)
        for at in range(0, len(content), BLOCK):
            if self._now - self._item.begin > most:
                raise too_large(f"{most:g} s of audio in a turn", "audio")
            block = io.BytesIO(content[at : at + BLOCK])
            await self._hear(soundfile.read(block, dtype="float32", **kind)[0])
            await asyncio.sleep(0)  # others are served

    async def _hear(self, signal: Signal) -> None:
        samples = to_int16(self._resampler.push(signal))
        self._now += samples_to_seconds(len(samples), self._rate)
        if self._cutter is None:
            await self._feed(samples)
            return
        for part in await asyncio.to_thread(self._cutter.push, samples):
            if part.began is not None:
                self._start(part.place)
                await self._announce(part.began)
            await self._feed(part.samples)
            if part.ended is not None:
                await self._finish(part.ended)
        if not self._item.is_open:
            self._item.begin = self._now

    async def _feed(self, samples: Samples, *, is_last: bool = False) -> None:
        """Run samples of the turn, and send what they make known."""
        if self._recognizer.live is not None:  # else it is counted as a file
            self._metrics.audio.inc(samples_to_seconds(len(samples), self._rate))
        self._heard.feed(samples)
        self._heard.is_finished = is_last
        for event in await self._recognizer.advance(self._heard):
            await self._tell(event, is_last=is_last)

    async def _tell(self, event: Event, *, is_last: bool) -> None:
        """Send what an event adds to the text; where the rules end turns, a Final is the end."""
        item = self._item
        by_rules = self._cutter is None and self._options.silence is not None and not is_last
        match event:
            case Final():
                item.finals.append(event)
                text = stable = item.text()
            case Partial():
                words = event.text.split()
                text, stable = item.text(event.text), item.text(" ".join(words[: event.stable]))
            case Endpoint(rule="nothing") if by_rules:
                item.begin = event.seconds
                return
            case _:
                return
        if text and by_rules and not item.is_open:
            await self._announce(event.seconds)
        more = stable[len(item.shown) :] if stable.startswith(item.shown) else ""
        item.shown += more
        await self._send_text("delta", delta=more, hypothesis=text)
        if isinstance(event, Final) and by_rules:
            await self._end(event.end)
            await self._complete(event.end)

    async def _announce(self, begin: float) -> None:
        item, ms = self._item, round(1000 * begin)
        item.is_open = True
        await self._send(f"{BUFFER}.speech_started", item_id=item.id, audio_start_ms=ms)

    async def _commit(self) -> None:
        """End the turn here, and the stream with it."""
        if self._now - self._item.begin < SHORTEST:
            told = f"A turn must have {SHORTEST:g} s of audio, but has less. Append more."
            raise ApiError(400, told, code="input_audio_buffer_commit_empty")
        samples = to_int16(self._resampler.push(END, is_last=True))
        self._now += samples_to_seconds(len(samples), self._rate)
        await self._finish(self._now, samples)
        self._begin()

    async def _finish(self, end: float, samples: Samples = NOTHING) -> None:
        """End the turn with its last samples; end: of its speech."""
        await self._end(end)
        try:
            await self._feed(samples, is_last=True)
        except SbkitError as error:
            await self._send_text("failed", error=as_api_error(error).plain()["error"])
            self._item = Item(self._now)
        else:
            await self._complete(self._now)

    async def _end(self, end: float) -> None:
        item = self._item
        if item.is_open:
            ms = round(1000 * end)
            await self._send(f"{BUFFER}.speech_stopped", item_id=item.id, audio_end_ms=ms)
        before, self._last_item = self._last_item, item.id
        await self._send(f"{BUFFER}.committed", item_id=item.id, previous_item_id=before)

    async def _complete(self, end: float) -> None:
        """Send the transcript of the turn, and begin to wait for the next one."""
        item = self._item
        words = [word.plain() for each in item.finals for word in each.words]
        await self._send_text(
            "completed",
            transcript=item.text(),
            usage={"type": "duration", "seconds": round(end - item.begin, 3)},
            words=[{"word": each.pop("text"), **each} for each in words],
        )
        self._item = Item(end)

    async def _fail(self, error: Exception, event: object = None) -> None:
        content = as_api_error(error).plain()["error"]
        await self._send("error", error={**content, "event_id": event})

    async def _send_text(self, kind: str, **content: Any) -> None:
        about = {"item_id": self._item.id, "content_index": 0}
        await self._send(f"{TRANSCRIPTION}.{kind}", **about, **content)

    async def _send(self, kind: str, **content: Any) -> None:
        event = {"type": kind, "event_id": f"event_{uuid4().hex}", **content}
        await self._socket.send_text(json.dumps(event))  # ASCII: half a character may come back

    def _plain(self) -> dict[str, Any]:
        """Return the options that are in effect."""
        kind = {"id": self._id, "object": "realtime.transcription_session", "type": "transcription"}
        return {**kind, "audio": {"input": self._options.plain}}

    @property
    def _is_heard(self) -> bool:
        """Check whether a turn is being spoken."""
        by_client = self._options.silence is None
        return self._item.is_open or (by_client and self._now > self._item.begin)


def _parse(message: Message) -> dict[str, Any]:
    """Read an event of a client; raises ApiError."""
    must, text = "an event as JSON in a text frame", message.get("text")
    if text is None:
        raise wrong_field("message", must, "binary; append audio in base64")
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise wrong_field("message", must, text)
    return event

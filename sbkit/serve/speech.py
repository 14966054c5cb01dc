"""Speech from text: what a client may choose, as OpenAI's API has it, and what is sent to it."""

import json
import math
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from starlette.responses import StreamingResponse

from sbkit.base.errors import SbkitError
from sbkit.serve.answers import EVENTS, event
from sbkit.serve.encoder import FORMATS
from sbkit.serve.errors import ApiError, as_api_error
from sbkit.serve.fields import check_number, choose, take, wrong_field
from sbkit.serve.metrics import noted
from sbkit.serve.models import Models
from sbkit.serve.voice import Voice

LONGEST = 4096  # characters
LARGEST = 1 << 16  # bytes of a request; JSON may write a character in twelve
NOTES_HEADER = "X-Sbkit-Notes"  # a JSON list in ASCII, of audio; events have it in their last one
MAX_NOTES_BYTES = 2000  # of that header; proxies refuse large ones
VOICES = (  # of that API, each of which is the model's own here
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


@dataclass(frozen=True, kw_only=True)
class SpeechFields:
    """What a client asks for; is_streamed: whether the audio comes as server-sent events."""

    voice: Voice
    text: str
    speed: float
    format: str
    is_streamed: bool

    @classmethod
    def parse(cls, content: bytes, models: Models) -> "SpeechFields":
        """Read a request.

        Raises:
            ApiError: a field is missing or has another value than the API or the model allows.
        """
        try:
            given = json.loads(content)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ApiError(400, "A request must be a JSON object, but is not. Correct it.")
        given = {name: value for name, value in given.items() if value is not None}
        text = take(given, "input", str)
        if not 0 < len(text) <= LONGEST:
            must, came = f"a text of 1 to {LONGEST} characters", f"{len(text)} characters long"
            raise wrong_field("input", must, came)
        speed = check_number("speed", given.get("speed", 1.0), 0.25, 4)
        format = choose("response_format", given.get("response_format", "mp3"), [*FORMATS])
        stream = choose("stream_format", given.get("stream_format", "audio"), ("audio", "sse"))
        return cls(
            voice=_find_voice(models, take(given, "model", str), given.get("voice")),
            text=text,
            speed=speed,
            format=format,
            is_streamed=stream == "sse",
        )


def _find_voice(models: Models, model: str, voice: object) -> Voice:
    """Return the model that speaks; voice: its name, or one of OpenAI's; an alias has any."""
    found, own = models.pick(Voice, model), models.names_of(Voice)
    own = [model] if model in own else own
    name = voice.get("id") if isinstance(voice, dict) else voice
    if name not in (None, *own, *VOICES):
        raise wrong_field("voice", " or ".join([*own, "one of OpenAI's"]), str(name))
    return models.pick(Voice, str(name)) if name in own else found


async def speech_response(fields: SpeechFields) -> StreamingResponse:
    """Send speech as it is made; raises ApiError where the text cannot be spoken."""
    parts: AsyncGenerator[Any] = fields.voice.speak(fields.text, fields.speed, fields.format)
    try:
        notes, first = await anext(parts), await anext(parts)
    except SbkitError as error:
        raise ApiError(400, str(error), "input") from error
    if fields.is_streamed:
        events = _events(first, parts, len(fields.text), notes)
        return StreamingResponse(events, media_type=EVENTS)
    headers = {NOTES_HEADER: _notes_header(notes)} if notes else {}
    media_type = FORMATS[fields.format].media_type
    return StreamingResponse(_file(first, parts), media_type=media_type, headers=headers)


def _notes_header(notes: Sequence[str]) -> str:
    """Write as many notes as a header may hold."""
    sizes = accumulate(len(json.dumps(note)) + len(", ") for note in notes)
    return json.dumps(
        [note for note, size in zip(notes, sizes, strict=True) if size <= MAX_NOTES_BYTES]
    )


async def _file(part: bytes | float, parts: AsyncGenerator[Any]) -> AsyncIterator[bytes]:
    async with aclosing(parts):
        while isinstance(part, bytes):
            yield part
            part = await anext(parts)
    noted.get()["audio_seconds"] = part


async def _events(
    part: bytes | float, parts: AsyncGenerator[Any], characters: int, notes: Sequence[str]
) -> AsyncIterator[str]:
    """Write server-sent events; their tokens are characters of text, and seconds of speech."""
    async with aclosing(parts):
        try:
            while isinstance(part, bytes):
                yield event("speech.audio.delta", audio=b64encode(part).decode())
                part = await anext(parts)
            noted.get()["audio_seconds"] = part
            usage = {"input_tokens": characters, "output_tokens": math.ceil(part)}
            total = {"total_tokens": sum(usage.values())}
            more = {"notes": notes} if notes else {}
            yield event("speech.audio.done", usage={**usage, **total}, **more)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())

"""Answers in the form of OpenAI's API: errors, transcripts, speech, and server-sent events."""

import json
import math
import zlib
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ExceptionHandler

from sbkit.base.errors import SbkitError
from sbkit.runtime.subtitles import cues, to_srt, to_vtt
from sbkit.runtime.transcriber import Transcript
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

CLIENT_GONE = 499  # nobody reads it; metrics count it, as nginx's do
ERROR_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
ERROR_HEADERS = {status: {"Retry-After": "1"} for status in (429, 503)}  # seconds
ERROR_HEADERS[426] = {"Upgrade": "websocket", "Connection": "Upgrade"}
EVENT_STREAM = "text/event-stream"
NOTES_HEADER = "X-Sbkit-Notes"  # a JSON list in ASCII; server-sent events have it in the last one
MAX_NOTES_BYTES = 2000  # of that header; proxies refuse large ones

Json = Any  # a value of JSON
JsonObject = dict[str, Json]

request_facts: ContextVar[JsonObject] = ContextVar("facts")  # for the log: model, audio_seconds


class ApiError(SbkitError):
    """An answer with another status than 200; param: the field that is at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = ERROR_CODES.get(status) if code is None else code

    def plain(self) -> dict[str, dict[str, str | None]]:
        """Return the body; the API fixes the type and the code of each status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        content = {"message": str(self), "type": kind, "param": self.param}
        return {"error": {**content, "code": self.code}}


def wrong_field(name: str, expected: str, actual: str) -> ApiError:
    """Return the error about a field with an invalid value."""
    return ApiError(400, f"`{name}` must be {expected}, but is {actual[:100]}.", name)


def too_large(limit: str, name: str = "file") -> ApiError:
    """Return the error about a file, or audio, that exceeds a limit of bytes or seconds."""
    return ApiError(413, f"`{name}` has more than {limit}, the limit. Send it in parts.", name)


def as_api_error(error: Exception) -> ApiError:
    """Convert an error of sbkit, of Starlette (404, a broken form), or a fault of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"The API does not accept this request: {error.detail}")
    return ApiError(500, "Internal server error; see the server log.")


def _handle(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    answer = as_api_error(error)
    return JSONResponse(answer.plain(), answer.status, headers=ERROR_HEADERS.get(answer.status))


HANDLERS: Mapping[type[Exception], ExceptionHandler] = dict.fromkeys(
    (ApiError, HTTPException, ClientDisconnect, Exception), _handle
)


def event(name: str, **content: Json) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps({'type': name, **content}, ensure_ascii=False)}\n\n"


TEXT_FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "text": lambda transcript: transcript.text + "\n",
    "srt": lambda transcript: to_srt(transcript.words),
    "vtt": lambda transcript: to_vtt(transcript.words),
}


def transcript_response(
    transcript: Transcript, *, format: str, granularities: Sequence[str], language: str | None
) -> Response:
    """Write a transcript in the format that was asked for."""
    request_facts.get()["audio_seconds"] = transcript.seconds
    if format in TEXT_FORMATS:
        return PlainTextResponse(TEXT_FORMATS[format](transcript))
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    content = {"text": transcript.text, "usage": usage}
    if format == "verbose_json":
        content |= _times(transcript, granularities)
        content |= {"task": "transcribe", "language": language or "und"}
    return JSONResponse(content)


async def transcript_events(
    first: str | Transcript, results: AsyncGenerator[str | Transcript]
) -> AsyncIterator[str]:
    """Write server-sent events of texts and their transcript; first: of the results."""
    async with aclosing(results):
        try:
            result = first
            while isinstance(result, str):
                if result:
                    yield event("transcript.text.delta", delta=result)
                result = await anext(results)
            request_facts.get()["audio_seconds"] = result.seconds
            yield event("transcript.text.done", text=result.text)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())


def words_of(words: Sequence[Word]) -> list[JsonObject]:
    """Return timed words as the API has them."""
    plain = (word.plain() for word in words)
    return [{"word": word.pop("text"), **word} for word in plain]


def _times(transcript: Transcript, granularities: Sequence[str]) -> JsonObject:
    content: JsonObject = {"duration": round(transcript.seconds, 3)}
    if "segment" in granularities:
        content["segments"] = [
            _segment(index, cue) for index, cue in enumerate(cues(transcript.words))
        ]
    if "word" in granularities:
        content["words"] = words_of(transcript.words)
    return content


def _segment(index: int, words: Sequence[Word]) -> JsonObject:
    """Describe the words of a subtitle; fields without a counterpart in CTC say "good speech".

    avg_logprob: from the words' confidences, 0 without any.
    compression_ratio: the bytes of the text, divided by those that zlib makes of it.
    """
    text = join_segments(word.text for word in words)
    log_probs = [
        math.log(max(word.confidence, 1e-6)) for word in words if word.confidence is not None
    ]
    content = text.encode()
    return {
        "id": index,
        "seek": 0,
        "start": round(words[0].start, 3),
        "end": round(words[-1].end, 3),
        "text": text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": sum(log_probs) / len(log_probs) if log_probs else 0.0,
        "compression_ratio": len(content) / len(zlib.compress(content)),
        "no_speech_prob": 0.0,
    }


async def speech_response(
    parts: AsyncGenerator[Any], *, media_type: str, num_characters: int, is_streamed: bool
) -> StreamingResponse:
    """Send speech while it is synthesized.

    parts: notes, the bytes of a file as they are made, then its seconds.
    num_characters: of the text.
    is_streamed: whether to send server-sent events instead of a file.

    Raises:
        ApiError: the text cannot be spoken.
    """
    try:
        notes, first = await anext(parts), await anext(parts)
    except SbkitError as error:
        raise ApiError(400, str(error), "input") from error
    if is_streamed:
        events = _speech_events(first, parts, num_characters, notes)
        return StreamingResponse(events, media_type=EVENT_STREAM)
    headers = {NOTES_HEADER: _notes_header(notes)} if notes else {}
    return StreamingResponse(_speech_file(first, parts), media_type=media_type, headers=headers)


def _notes_header(notes: Sequence[str]) -> str:
    """Write as many notes as fit into a header."""
    sizes = accumulate(len(json.dumps(note)) + len(", ") for note in notes)
    return json.dumps(
        [note for note, size in zip(notes, sizes, strict=True) if size <= MAX_NOTES_BYTES]
    )


async def _speech_file(part: bytes | float, parts: AsyncGenerator[Any]) -> AsyncIterator[bytes]:
    async with aclosing(parts):
        while isinstance(part, bytes):
            yield part
            part = await anext(parts)
    request_facts.get()["audio_seconds"] = part


async def _speech_events(
    part: bytes | float, parts: AsyncGenerator[Any], num_characters: int, notes: Sequence[str]
) -> AsyncIterator[str]:
    """Write server-sent events; their tokens are characters of text, and seconds of speech."""
    async with aclosing(parts):
        try:
            while isinstance(part, bytes):
                yield event("speech.audio.delta", audio=b64encode(part).decode())
                part = await anext(parts)
            request_facts.get()["audio_seconds"] = part
            usage = {"input_tokens": num_characters, "output_tokens": math.ceil(part)}
            usage["total_tokens"] = sum(usage.values())
            with_notes = {"notes": notes} if notes else {}
            yield event("speech.audio.done", usage=usage, **with_notes)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())

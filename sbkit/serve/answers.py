"""Transcripts in the formats of OpenAI's API."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from sbkit.runtime.subtitles import cues, to_srt, to_vtt
from sbkit.runtime.transcriber import Transcript
from sbkit.serve.fields import Fields
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word


def answer(transcript: Transcript, fields: Fields) -> Response:
    """Write a transcript in the format that is asked for."""
    if fields.format in TEXTS:
        return PlainTextResponse(TEXTS[fields.format](transcript))
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    content = {"text": transcript.text, "usage": usage}
    if fields.format == "verbose_json":
        content |= _times(transcript, fields.granularities)
        content |= {"task": "transcribe", "language": fields.recognizer.language or "und"}
    return JSONResponse(content)


EVENTS = "text/event-stream"
TEXTS: Mapping[str, Callable[[Transcript], str]] = {
    "text": lambda transcript: transcript.text + "\n",
    "srt": lambda transcript: to_srt(transcript.words),
    "vtt": lambda transcript: to_vtt(transcript.words),
}


def event(name: str, **content: Any) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps({'type': name, **content}, ensure_ascii=False)}\n\n"


def _times(transcript: Transcript, granularities: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {"duration": round(transcript.seconds, 3)}
    if "segment" in granularities:
        content["segments"] = [
            _segment(number, cue) for number, cue in enumerate(cues(transcript.words))
        ]
    if "word" in granularities:
        plain = (word.plain() for word in transcript.words)
        content["words"] = [{"word": each.pop("text"), **each} for each in plain]
    return content


def _segment(number: int, words: Sequence[Word]) -> dict[str, Any]:
    """Describe a subtitle's words; what CTC has no counterpart of has the value of good speech.

    avg_logprob: of the words' confidences, 0 where there are none; compression_ratio: the text's
    bytes by those of zlib.
    """
    text = join_segments(word.text for word in words)
    known = [math.log(max(word.confidence, 1e-6)) for word in words if word.confidence is not None]
    content = text.encode()
    return {
        "id": number,
        "seek": 0,
        "start": round(words[0].start, 3),
        "end": round(words[-1].end, 3),
        "text": text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": sum(known) / len(known) if known else 0.0,
        "compression_ratio": len(content) / len(zlib.compress(content)),
        "no_speech_prob": 0.0,
    }

"""OpenAI's API: read the fields of requests, and write answers in its form.

Fields of the API that this server does not need are ignored.
"""

import json
import math
import re
import zlib
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from io import IOBase
from itertools import accumulate, chain, starmap
from typing import NamedTuple, Self, TypeVar, cast

from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed
from sbkit.runtime.subtitles import cues, to_srt, to_vtt
from sbkit.runtime.transcriber import Transcript
from sbkit.serve.middleware import (
    ApiError,
    Json,
    JsonObject,
    as_api_error,
    request_facts,
    wrong_field,
)
from sbkit.serve.recognizer import Recognizer
from sbkit.serve.tts import FILE_FORMATS, SpeechParts, Voice
from sbkit.text.languages import primary
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

TRANSCRIPT_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED_FORMATS = ("json", "text")  # formats whose text can be sent bit by bit
GRANULARITIES = ("segment", "word")
MAX_PROMPT_PHRASES = 100
MAX_SPEECH_CHARACTERS = 4096
MAX_SPEECH_BYTES = 1 << 16  # of a request; JSON may need twelve bytes for a character
MAX_SESSION_CHARACTERS = 1 << 16  # of a prompt and keywords together
OPENAI_VOICES = (  # names of the API, which all mean the model's own voice
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


class AudioFormat(NamedTuple):
    """The format of the audio that a session receives; ``subtype`` is its name in libsndfile."""

    subtype: str
    rate: int
    sample_bytes: int


AUDIO_FORMATS = {
    "audio/pcm": AudioFormat("PCM_16", rate=24_000, sample_bytes=2),
    "audio/pcmu": AudioFormat("ULAW", rate=8_000, sample_bytes=1),
    "audio/pcma": AudioFormat("ALAW", rate=8_000, sample_bytes=1),
}
TYPE_NAMES = {dict: "an object", str: "a text", list: "a list", int: "a whole number"}
EVENT_STREAM = "text/event-stream"
NOTES_HEADER = "X-Sbkit-Notes"  # a JSON list in ASCII; for server-sent events, in the last event
MAX_NOTES_BYTES = 2000  # of that header; proxies refuse large headers

Engine = TypeVar("Engine", bound=Recognizer | Voice)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A served bundle."""

    name: str  # of the bundle's folder
    engine: Recognizer | Voice
    created: int = 0  # the time of the export, in seconds since 1970
    readme: str = ""  # the model card


@dataclass(frozen=True, kw_only=True)
class Models:
    """All served bundles; an alias means the first bundle with that class of engine."""

    models: Sequence[Model]
    aliases: Mapping[type, Sequence[str]]

    @property
    def names(self) -> list[str]:
        """All names that clients may use."""
        names = (model.name for model in self.models)
        return [*dict.fromkeys(chain(names, *self.aliases.values()))]

    def engines(self, kind: type[Engine]) -> dict[str, Engine]:
        """Return the engines of a class by their names."""
        return {model.name: model.engine for model in self.models if isinstance(model.engine, kind)}

    def pick(self, kind: type[Engine], name: str = "") -> Engine:
        """Return the engine with a name, by default the first of its class; raises ApiError."""
        engines, aliases = self.engines(kind), self.aliases.get(kind, ())
        if name not in engines and (not name or name in aliases):
            name = next(iter(engines), name)
        if name not in engines:
            raise unknown_model(name, [*engines, *aliases] if engines else [])
        request_facts.get({})["model"] = name
        return engines[name]

    def pick_recognizer(self, name: str, languages: Sequence[Json]) -> Recognizer:
        """Return the recognizer with a name, which must have one of the languages if any are given.

        A recognizer whose language is und (undetermined) accepts all. Raises ApiError.
        """
        recognizer = self.pick(Recognizer, name)
        model_language = primary(recognizer.language or "und")
        tags = [str(language) for language in languages if language]
        if tags and model_language not in ("und", *map(primary, tags)):
            raise wrong_field("language", f"{model_language}, the model's", listed(tags))
        return recognizer

    def pick_voice(self, model: str, voice: object) -> Voice:
        """Return the voice with a model's name.

        If ``model`` is an alias, ``voice`` may name another. Raises ApiError.
        """
        engine, names = self.pick(Voice, model), [*self.engines(Voice)]
        if model in names:
            names = [model]
        name = voice.get("id") if isinstance(voice, dict) else voice
        if name not in (None, *names, *OPENAI_VOICES):
            raise wrong_field("voice", " or ".join([*names, "one of OpenAI's"]), str(name))
        return self.pick(Voice, str(name)) if name in names else engine


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """Return the error about a model that is not served, or not for this kind of request."""
    actual = name[:100] or "missing"
    message = f"`model` must be one of {listed(names, max_names=10)}, but is {actual}."
    if not names:
        message = f"This server has no model for this request; `model` is {actual}."
    return ApiError(404, message, "model")


@dataclass(frozen=True, kw_only=True)
class TranscriptionRequest:
    """The fields of a request for a transcript."""

    file: UploadFile
    recognizer: Recognizer
    format: str
    granularities: Sequence[str]  # of verbose_json
    phrases: tuple[str, ...]  # that the decoder expects
    is_streamed: bool  # whether to send the text as events

    @classmethod
    def parse(cls, form: FormData, models: Models) -> Self:
        """Read a form; raises ApiError if the API or the model does not allow a field."""
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise wrong_field("file", "an audio file", "missing" if file is None else "a text")
        text = {name: str(form.get(name, "")) for name in ("model", "prompt", "temperature")}
        languages = [*form.getlist("language"), *form.getlist("languages[]")]
        recognizer = models.pick_recognizer(text["model"], languages)
        # Decoding is not random, so a temperature changes nothing.
        check_number("temperature", text["temperature"] or 0, 0, 1)
        format = choose("response_format", form.get("response_format", "json"), TRANSCRIPT_FORMATS)
        granularities = [str(value) for value in form.getlist("timestamp_granularities[]")]
        for value in granularities:
            if format != "verbose_json" or value not in GRANULARITIES:
                expected = "word or segment, with verbose_json"
                raise wrong_field("timestamp_granularities[]", expected, f"{value} with {format}")
        is_streamed = choose("stream", form.get("stream", "false"), ("false", "true")) == "true"
        if is_streamed and format not in STREAMED_FORMATS:
            raise wrong_field("stream", f"false with {format}, or the format json", "true")
        return cls(
            file=file,
            recognizer=recognizer,
            format=format,
            granularities=granularities or GRANULARITIES[:1],
            phrases=split_phrases(text["prompt"]),
            is_streamed=is_streamed,
        )


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """The fields of a request for speech."""

    voice: Voice
    text: str
    speed: float
    format: str
    is_streamed: bool  # whether to send the audio as events

    @classmethod
    def parse(cls, content: bytes, models: Models) -> Self:
        """Read JSON; raises ApiError if the API or the model does not allow a field."""
        body = parse_object(content)
        if body is None:
            raise ApiError(400, "The body of the request is not a JSON object.")
        body = {name: value for name, value in body.items() if value is not None}
        text = take(body, "input", str)
        if not 0 < len(text) <= MAX_SPEECH_CHARACTERS:
            expected = f"a text of 1 to {MAX_SPEECH_CHARACTERS} characters"
            raise wrong_field("input", expected, f"{len(text)} characters long")
        speed = check_number("speed", body.get("speed", 1.0), 0.25, 4)
        format = choose("response_format", body.get("response_format", "mp3"), [*FILE_FORMATS])
        stream = choose("stream_format", body.get("stream_format", "audio"), ("audio", "sse"))
        return cls(
            voice=models.pick_voice(take(body, "model", str), body.get("voice")),
            text=text,
            speed=speed,
            format=format,
            is_streamed=stream == "sse",
        )


@dataclass(frozen=True)
class SessionOptions:
    """The options of a realtime session."""

    plain: Mapping[str, Json]  # all options, as ``audio.input`` of OpenAI's API
    recognizer: Recognizer
    format: AudioFormat
    phrases: tuple[str, ...]  # that the decoder expects
    silence: float | None  # seconds that end a turn; None if the client commits it

    @classmethod
    def parse(cls, audio_input: Mapping[str, Json], models: Models, model: str) -> Self:
        """Read ``audio.input``; ``model`` is the default name of the model. Raises ApiError."""
        audio = take(audio_input, "format", dict)
        transcription = {"model": model, **take(audio_input, "transcription", dict)}
        kind = take(audio, "type", str) or "audio/pcm"
        if kind not in AUDIO_FORMATS:
            raise wrong_field("format", listed(AUDIO_FORMATS), kind)
        format = AUDIO_FORMATS[kind]
        rate = format.rate
        if take(audio, "rate", int, rate) != rate:
            raise wrong_field("rate", f"{rate} with {kind}", str(audio["rate"]))
        languages = [take(transcription, "language", str), *take_texts(transcription, "languages")]
        recognizer = models.pick_recognizer(take(transcription, "model", str), languages)
        silence = _parse_silence(audio_input, recognizer.silence)
        phrases = [take(transcription, "prompt", str), *take_texts(transcription, "keywords")]
        if sum(map(len, phrases)) > MAX_SESSION_CHARACTERS:
            raise wrong_field("prompt", f"at most {MAX_SESSION_CHARACTERS} characters", "longer")
        ms = silence and round(1000 * silence)
        plain = {
            "format": {"type": kind, "rate": rate},
            "transcription": transcription,
            "turn_detection": ms and {"type": "server_vad", "silence_duration_ms": ms},
            "noise_reduction": None,
        }
        return cls(plain, recognizer, format, split_phrases("\n".join(phrases)), silence)


def _parse_silence(audio_input: Mapping[str, Json], default: float | None) -> float | None:
    """Read ``turn_detection``; ``default`` is None if the recognizer cannot end turns."""
    if "turn_detection" not in audio_input:
        return default
    if audio_input["turn_detection"] is None:
        return None
    detection = take(audio_input, "turn_detection", dict)
    kind = take(detection, "type", str) or "server_vad"
    if default is None:
        raise wrong_field("turn_detection", "null, since the model takes whole clips", kind)
    if kind != "server_vad":
        raise wrong_field("turn_detection", "server_vad or null", kind)
    ms = take(detection, "silence_duration_ms", int, round(1000 * default))
    return check_number("silence_duration_ms", ms, 1, 60_000) / 1000


def parse_object(content: str | bytes) -> JsonObject | None:
    """Read a JSON object; return None for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def choose(name: str, value: Json, choices: Sequence[str]) -> str:
    """Return a value in lower case; raises ApiError if it is not one of ``choices``."""
    if str(value).lower() not in choices:
        raise wrong_field(name, " or ".join(choices), str(value))
    return str(value).lower()


def check_number(name: str, value: Json, lowest: float, highest: float) -> float:
    """Return a number, which may be written as text; raises ApiError if it is out of bounds."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError for 400 digits
        number = math.nan
    if not lowest <= number <= highest:
        raise wrong_field(name, f"from {lowest:g} to {highest:g}", str(value))
    return number


def split_phrases(prompt: str) -> tuple[str, ...]:
    """Split a prompt at punctuation and line ends.

    >>> split_phrases("Ada Lovelace, the analytical engine.")
    ('Ada Lovelace', 'the analytical engine')
    """
    phrases = (part.strip() for part in re.split(r"[,;:.!?\n]+", prompt))
    return tuple(dict.fromkeys(filter(None, phrases)))[:MAX_PROMPT_PHRASES]


def take(content: Mapping[str, Json], name: str, kind: type, default: Json = None) -> Json:
    """Return a field; if it is null or missing, return the default, or an empty value of its type.

    Raises ApiError if the field has another type.
    """
    value = content.get(name)
    if value is None:
        return kind() if default is None else default
    if not isinstance(value, kind) or isinstance(value, bool):  # a bool is an int in Python
        raise wrong_field(name, TYPE_NAMES[kind], str(value))
    return value


def take_texts(content: Mapping[str, Json], name: str) -> list[str]:
    """Return a field that must be a list of texts; raises ApiError."""
    texts: list[str] = take(content, name, list)
    for text in texts:
        if not isinstance(text, str):
            raise wrong_field(name, "a list of texts", str(text))
    return texts


def event(name: str, **content: Json) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps({'type': name, **content}, ensure_ascii=False)}\n\n"


TEXT_FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "text": lambda transcript: transcript.text + "\n",
    "srt": lambda transcript: to_srt(transcript.words),
    "vtt": lambda transcript: to_vtt(transcript.words),
}


async def transcription_response(request: TranscriptionRequest) -> Response:
    """Transcribe the file of a request, and return its text in the requested format."""
    recognizer, phrases = request.recognizer, request.phrases
    upload = cast(IOBase, request.file.file)  # the recognizer closes it
    if request.is_streamed:
        results = recognizer.transcribe(upload, times=False, phrases=phrases)
        events = _transcript_events(await anext(results), results)
        return StreamingResponse(events, media_type=EVENT_STREAM)
    times = request.format not in STREAMED_FORMATS
    transcript = await recognizer.transcript(upload, times=times, phrases=phrases)
    request_facts.get()["audio_seconds"] = transcript.seconds
    if request.format in TEXT_FORMATS:
        return PlainTextResponse(TEXT_FORMATS[request.format](transcript))
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    content: JsonObject = {"text": transcript.text, "usage": usage}
    if request.format == "verbose_json":
        content["duration"] = round(transcript.seconds, 3)
        if "segment" in request.granularities:
            content["segments"] = list(starmap(_segment, enumerate(cues(transcript.words))))
        if "word" in request.granularities:
            content["words"] = words_of(transcript.words)
        content |= {"task": "transcribe", "language": recognizer.language or "und"}
    return JSONResponse(content)


async def _transcript_events(
    result: str | Transcript, results: AsyncGenerator[str | Transcript]
) -> AsyncIterator[str]:
    """Yield the texts of segments and their transcript as server-sent events."""
    async with aclosing(results):
        try:
            while isinstance(result, str):
                if result:
                    yield event("transcript.text.delta", delta=result)
                result = await anext(results)
            request_facts.get()["audio_seconds"] = result.seconds
            yield event("transcript.text.done", text=result.text)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())


def words_of(words: Sequence[Word]) -> list[JsonObject]:
    """Return timed words in the form of the API."""
    plain = (word.plain() for word in words)
    return [{"word": word.pop("text"), **word} for word in plain]


def _segment(index: int, words: Sequence[Word]) -> JsonObject:
    """Describe the words of a subtitle; fields without meaning for CTC stand for clear speech."""
    text = join_segments(word.text for word in words)
    log_confidences = [
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
        "avg_logprob": sum(log_confidences) / max(1, len(log_confidences)),
        "compression_ratio": len(content) / len(zlib.compress(content)),
        "no_speech_prob": 0.0,
    }


async def speech_response(request: SpeechRequest) -> StreamingResponse:
    """Return speech that is sent while it is made; raises ApiError if the text cannot be spoken."""
    parts = request.voice.speak(request.text, request.speed, request.format)
    try:
        notes, first = await anext(parts), await anext(parts)
    except SbkitError as error:
        raise ApiError(400, str(error), "input") from error
    if request.is_streamed:
        events = _speech_events(first, parts, len(request.text), notes)
        return StreamingResponse(events, media_type=EVENT_STREAM)
    media_type = FILE_FORMATS[request.format].media_type
    headers = {NOTES_HEADER: _notes_header(notes)} if notes else {}
    return StreamingResponse(_speech_file(first, parts), media_type=media_type, headers=headers)


def _notes_header(notes: Sequence[str]) -> str:
    sizes = accumulate(len(json.dumps(note)) + len(", ") for note in notes)
    fitting = [note for note, size in zip(notes, sizes, strict=True) if size <= MAX_NOTES_BYTES]
    return json.dumps(fitting)


async def _speech_file(part: bytes | float, parts: SpeechParts) -> AsyncIterator[bytes]:
    async with aclosing(parts):
        while isinstance(part, bytes):
            yield part
            part = await anext(parts)
    request_facts.get()["audio_seconds"] = part


async def _speech_events(
    part: bytes | float, parts: SpeechParts, num_characters: int, notes: Sequence[str]
) -> AsyncIterator[str]:
    """Yield server-sent events, which count characters and seconds of speech as tokens."""
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

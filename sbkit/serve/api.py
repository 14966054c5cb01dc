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
from typing import NamedTuple, Self, TypeVar, cast

from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sbkit.base.errors import SbkitError
from sbkit.base.messages import listed
from sbkit.runtime.subtitles import group_words, to_srt, to_vtt
from sbkit.runtime.transcriber import Transcript
from sbkit.serve.middleware import (
    EVENT_STREAM,
    ApiError,
    Json,
    JsonObject,
    event,
    request_facts,
    wrong_field,
)
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.tts import FILE_FORMATS, SpeechParts, Voice
from sbkit.text.languages import language_code
from sbkit.text.normalization import join_segments
from sbkit.text.word import Word

TRANSCRIPT_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED_FORMATS = ("json", "text")  # text that can be sent segment by segment, without word times
GRANULARITIES = ("segment", "word")
FILE_FIELD = "an audio file that is sent with a file name (curl: -F file=@talk.wav)"
MAX_PROMPT_PHRASES = 100
MAX_SPEECH_CHARACTERS = 4096
MAX_SPEECH_BYTES = 1 << 16  # of a request; JSON may need twelve bytes for a character
MAX_SESSION_CHARACTERS = 1 << 16  # of a prompt and keywords together
# Voices of OpenAI's API; any of them stands for the model's own voice.
OPENAI_VOICES = (
    "alloy",
    "ash",
    "ballad",
    "cedar",
    "coral",
    "echo",
    "fable",
    "marin",
    "nova",
    "onyx",
    "sage",
    "shimmer",
    "verse",
)
# A phrase ends at these characters, and at a period before a space, except after an abbreviation
# such as Dr. or U.S.A.
PHRASE_END = re.compile(
    r"[,;:!?\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]+"
    r"|(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z]{2})(?<!\.\w)\.+(?=\s|$)"
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
NOTES_HEADER = "X-Sbkit-Notes"  # a JSON list in ASCII; for server-sent events, in the last event
MAX_NOTES_BYTES = 2000  # of that header; proxies refuse large headers

Engine = TypeVar("Engine", bound=RecognitionService | Voice)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A served bundle."""

    name: str  # of the bundle's folder
    engine: RecognitionService | Voice
    created: int = 0  # the time of the export, in seconds since 1970
    readme: str = ""  # the model card


@dataclass(frozen=True, kw_only=True)
class ServedModels:
    """All served bundles.

    aliases: further names for the first bundle of each class of engine.
    """

    models: Sequence[ServedModel]
    aliases: Mapping[type, Sequence[str]]

    @property
    def names(self) -> list[str]:
        """All names that clients may use."""
        names = [model.name for model in self.models]
        for aliases in self.aliases.values():
            names += aliases
        return list(dict.fromkeys(names))

    def engines(self, engine_class: type[Engine]) -> dict[str, Engine]:
        """Return the engines of a class by their names."""
        return {
            model.name: model.engine
            for model in self.models
            if isinstance(model.engine, engine_class)
        }

    def pick(self, engine_class: type[Engine], name: str = "") -> Engine:
        """Return the engine with a name, by default the first of its class; raises ApiError."""
        engines = self.engines(engine_class)
        if not engines:
            raise unknown_model(name, [])
        aliases = self.aliases.get(engine_class, ())
        if name not in engines:
            if name and name not in aliases:
                raise unknown_model(name, [*engines, *aliases])
            name = next(iter(engines))
        request_facts.get({})["model"] = name
        return engines[name]

    def pick_recognizer(self, name: str, languages: Sequence[Json]) -> RecognitionService:
        """Return the recognizer with a name.

        Raises ApiError if the request names languages, but neither the recognizer's nor auto. A
        recognizer whose language is und (undetermined) accepts all languages.
        """
        recognizer = self.pick(RecognitionService, name)
        model_language = language_code(recognizer.language or "und")
        tags = [tag for language in languages if (tag := str(language or "").strip())]
        codes = {*map(language_code, tags)}
        if tags and model_language != "und" and not codes & {"auto", model_language}:
            raise wrong_field("language", f"{model_language}, the model's", listed(tags))
        return recognizer

    def pick_voice(self, model: str, voice: object) -> Voice:
        """Return the voice of a TTS model; raises ApiError.

        model: the name of a served model, or an alias.
        voice: one of OpenAI's names or null, which stand for the model's own voice. If ``model``
            is an alias, also the name of any served voice.
        """
        default_voice = self.pick(Voice, model)
        voice_names = list(self.engines(Voice))
        if model in voice_names:
            voice_names = [model]
        name = voice.get("id") if isinstance(voice, dict) else voice
        if name in voice_names:
            return self.pick(Voice, str(name))
        if name is not None and name not in OPENAI_VOICES:
            raise wrong_field("voice", " or ".join([*voice_names, "one of OpenAI's"]), str(name))
        return default_voice


def unknown_model(name: str, served_names: Sequence[str]) -> ApiError:
    """Return the error about a model that is not served, or not for this type of request.

    served_names: the models for this type of request.
    """
    actual = name[:100] or "missing"
    if not served_names:
        message = f"This server has no model for this request; `model` is {actual}."
    else:
        message = f"`model` must be one of {listed(served_names, max_names=10)}, but is {actual}."
    return ApiError(404, message, "model")


@dataclass(frozen=True, kw_only=True)
class TranscriptionRequest:
    """The fields of a request for a transcript."""

    file: UploadFile
    recognizer: RecognitionService
    response_format: str
    granularities: Sequence[str]  # of verbose_json: segment, word
    phrases: tuple[str, ...]  # of the prompt; the decoder expects them
    channel: int | None  # of the file, counted from 0; None: all are mixed
    is_streamed: bool  # whether to send the text as events

    @classmethod
    def parse(cls, form: FormData, models: ServedModels) -> Self:
        """Read a form; raises ApiError if the API or the model does not allow a field."""
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise wrong_field("file", FILE_FIELD, "missing" if file is None else "a text")
        languages = [*form.getlist("language"), *read_list(form, "languages")]
        recognizer = models.pick_recognizer(str(form.get("model", "")), languages)
        # Checked as the API requires; decoding is not random, so it has no effect.
        check_number("temperature", str(form.get("temperature") or 0), 0, 1)
        response_format = choose(
            "response_format", form.get("response_format", "json"), TRANSCRIPT_FORMATS
        )
        granularities = read_list(form, "timestamp_granularities")
        for granularity in granularities:
            if response_format != "verbose_json" or granularity not in GRANULARITIES:
                raise wrong_field(
                    "timestamp_granularities[]",
                    "word or segment, with verbose_json",
                    f"{granularity} with {response_format}",
                )
        channels = [str(value).strip() for value in form.getlist("channel") if value]
        if len(channels) > 1 or not all(re.fullmatch(r"\d{1,3}", text) for text in channels):
            raise wrong_field("channel", "one number from 0", ", ".join(channels))
        is_streamed = choose("stream", form.get("stream", "false"), ("false", "true")) == "true"
        if is_streamed and response_format not in STREAMED_FORMATS:
            raise wrong_field("stream", f"false with {response_format}, or the format json", "true")
        return cls(
            file=file,
            recognizer=recognizer,
            response_format=response_format,
            granularities=granularities or ("segment",),
            phrases=split_phrases(str(form.get("prompt", ""))),
            channel=int(channels[0]) if channels else None,
            is_streamed=is_streamed,
        )


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """The fields of a request for speech."""

    voice: Voice
    text: str
    speed: float
    response_format: str
    is_streamed: bool  # whether to send the audio as events

    @classmethod
    def parse(cls, content: bytes, models: ServedModels) -> Self:
        """Read JSON; raises ApiError if the API or the model does not allow a field."""
        body = parse_object(content)
        if body is None:
            raise ApiError(400, "The body of the request is not a JSON object.")
        body = without_nulls(body)
        text = read_field(body, "input", str)
        if not 0 < len(text) <= MAX_SPEECH_CHARACTERS:
            expected = f"a text of 1 to {MAX_SPEECH_CHARACTERS} characters"
            raise wrong_field("input", expected, f"{len(text)} characters long")
        speed = check_number("speed", body.get("speed", 1.0), 0.25, 4)
        response_format = choose(
            "response_format", body.get("response_format", "mp3"), list(FILE_FORMATS)
        )
        stream_format = choose(
            "stream_format", body.get("stream_format", "audio"), ("audio", "sse")
        )
        return cls(
            voice=models.pick_voice(read_field(body, "model", str), body.get("voice")),
            text=text,
            speed=speed,
            response_format=response_format,
            is_streamed=stream_format == "sse",
        )


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options of a realtime session."""

    echoed_options: Mapping[str, Json]  # all options, as the client gets them in ``audio.input``
    recognizer: RecognitionService
    audio_format: AudioFormat
    phrases: tuple[str, ...]  # of the prompt and the keywords; the decoder expects them
    silence_seconds: float | None  # silence that ends a turn; None if only the client ends turns

    @classmethod
    def parse(
        cls, audio_input: Mapping[str, Json], models: ServedModels, default_model: str
    ) -> Self:
        """Read ``audio.input``; raises ApiError if the API or the model does not allow a field.

        default_model: the model that the client named when it connected.
        """
        format_fields = read_field(audio_input, "format", dict)
        media_type = read_field(format_fields, "type", str) or "audio/pcm"
        if media_type not in AUDIO_FORMATS:
            raise wrong_field("format", listed(AUDIO_FORMATS), media_type)
        audio_format = AUDIO_FORMATS[media_type]
        rate = read_field(format_fields, "rate", int, audio_format.rate)
        if rate != audio_format.rate:
            raise wrong_field("rate", f"{audio_format.rate} with {media_type}", str(rate))

        transcription_fields = read_field(audio_input, "transcription", dict)
        transcription = {"model": default_model, **without_nulls(transcription_fields)}
        languages = [
            read_field(transcription, "language", str),
            *read_texts(transcription, "languages"),
        ]
        model = read_field(transcription, "model", str)
        recognizer = models.pick_recognizer(model, languages)
        prompts = [
            read_field(transcription, "prompt", str),
            *read_texts(transcription, "keywords"),
        ]
        if sum(map(len, prompts)) > MAX_SESSION_CHARACTERS:
            raise wrong_field("prompt", f"at most {MAX_SESSION_CHARACTERS} characters", "longer")

        silence_seconds = _parse_silence(audio_input, recognizer.silence)
        turn_detection: JsonObject | None = None
        if silence_seconds is not None:
            silence_ms = round(1000 * silence_seconds)
            turn_detection = {"type": "server_vad", "silence_duration_ms": silence_ms}
        echoed_options = {
            "format": {"type": media_type, "rate": rate},
            "transcription": transcription,
            "turn_detection": turn_detection,
            "noise_reduction": None,
        }
        return cls(
            echoed_options=echoed_options,
            recognizer=recognizer,
            audio_format=audio_format,
            phrases=split_phrases("\n".join(prompts)),
            silence_seconds=silence_seconds,
        )


def _parse_silence(audio_input: Mapping[str, Json], default_seconds: float | None) -> float | None:
    """Read the seconds of silence that end a turn from ``turn_detection``; null: no detection.

    default_seconds: if the field is missing. None if the recognizer cannot end turns.
    """
    if "turn_detection" not in audio_input:
        return default_seconds
    if audio_input["turn_detection"] is None:
        return None
    detection = read_field(audio_input, "turn_detection", dict)
    detection_type = read_field(detection, "type", str) or "server_vad"
    if default_seconds is None:
        expected = "null, since the model takes whole clips"
        raise wrong_field("turn_detection", expected, detection_type)
    if detection_type != "server_vad":
        raise wrong_field("turn_detection", "server_vad or null", detection_type)
    ms = read_field(detection, "silence_duration_ms", int, round(1000 * default_seconds))
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

    >>> split_phrases("Ada Lovelace of the U.S.A., the analytical engine. Dr. Smith: 3.5 mm")
    ('Ada Lovelace of the U.S.A.', 'the analytical engine', 'Dr. Smith', '3.5 mm')
    """
    phrases = [phrase.strip() for phrase in PHRASE_END.split(prompt)]
    return tuple(dict.fromkeys(filter(None, phrases)))[:MAX_PROMPT_PHRASES]


def without_nulls(fields: Mapping[str, Json]) -> JsonObject:
    """Drop the fields that are null, which means that they are not given."""
    return {name: value for name, value in fields.items() if value is not None}


def read_field(
    fields: Mapping[str, Json], name: str, field_type: type, default: Json = None
) -> Json:
    """Return a field; if it is null or missing, return the default, or an empty value of its type.

    Raises ApiError if the field has another type.
    """
    value = fields.get(name)
    if value is None:
        return field_type() if default is None else default
    if not isinstance(value, field_type) or isinstance(value, bool):  # a bool is an int in Python
        raise wrong_field(name, TYPE_NAMES[field_type], str(value))
    return value


def read_list(form: FormData, name: str) -> list[str]:
    """Return the values of a field of a form whose name may end in brackets."""
    return [str(value) for value in (*form.getlist(name), *form.getlist(f"{name}[]"))]


def read_texts(fields: Mapping[str, Json], name: str) -> list[str]:
    """Return a copy of a field that must be a list of texts; raises ApiError."""
    texts: list[str] = list(read_field(fields, name, list))
    for text in texts:
        if not isinstance(text, str):
            raise wrong_field(name, "a list of texts", str(text))
    return texts


TEXT_FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "text": lambda transcript: transcript.text + "\n",
    "srt": lambda transcript: to_srt(transcript.words),
    "vtt": lambda transcript: to_vtt(transcript.words),
}


async def transcription_response(request: TranscriptionRequest) -> Response:
    """Transcribe the file of a request, and return its text in the requested format."""
    recognizer = request.recognizer
    upload = cast(IOBase, request.file.file)  # the recognizer closes it
    if request.is_streamed:
        results = recognizer.transcribe(
            upload, times=False, phrases=request.phrases, channel=request.channel
        )
        first_result = await anext(results)  # its error is still an answer with its own status
        events = _transcript_events(first_result, results)
        return StreamingResponse(events, media_type=EVENT_STREAM)
    with_word_times = request.response_format not in STREAMED_FORMATS
    transcript = await recognizer.transcript(
        upload, times=with_word_times, phrases=request.phrases, channel=request.channel
    )
    request_facts.get()["audio_seconds"] = transcript.seconds
    if request.response_format in TEXT_FORMATS:
        return PlainTextResponse(TEXT_FORMATS[request.response_format](transcript))
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    content: JsonObject = {"text": transcript.text, "usage": usage}
    if request.response_format == "verbose_json":
        content["duration"] = round(transcript.seconds, 3)
        if "segment" in request.granularities:
            groups = enumerate(group_words(transcript.words))
            content["segments"] = [_segment(index, words) for index, words in groups]
        if "word" in request.granularities:
            content["words"] = words_of(transcript.words)
        content["task"] = "transcribe"
        content["language"] = recognizer.language or "und"
    return JSONResponse(content)


async def _transcript_events(
    first_result: str | Transcript, results: AsyncGenerator[str | Transcript]
) -> AsyncIterator[str]:
    """Yield the texts of segments and their transcript as server-sent events."""
    async with aclosing(results):
        async for result in _with_first(first_result, results):
            if isinstance(result, Transcript):
                request_facts.get()["audio_seconds"] = result.seconds
                yield event("transcript.text.done", text=result.text)
            elif result:
                yield event("transcript.text.delta", delta=result)


async def _with_first(
    first_result: str | Transcript, results: AsyncGenerator[str | Transcript]
) -> AsyncIterator[str | Transcript]:
    yield first_result
    async for result in results:
        yield result


def words_of(words: Sequence[Word]) -> list[JsonObject]:
    """Return timed words in the form of the API, which calls their text ``word``."""
    fields_of_words = [word.plain() for word in words]
    return [{"word": fields.pop("text"), **fields} for fields in fields_of_words]


def _segment(index: int, words: Sequence[Word]) -> JsonObject:
    """Describe the words of a subtitle.

    CTC has no value for some fields of the API. They get the value that clear speech has.
    """
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


class SpeechStream:
    """Speech that is sent while it is synthesized.

    notes: remarks on the text, known once `start` has returned.
    seconds: the duration, known once all chunks are read.
    """

    def __init__(self, parts: SpeechParts) -> None:
        self._parts = parts
        self.notes: Sequence[str] = ()
        self.seconds = 0.0

    async def start(self) -> None:
        """Wait for the notes and the first chunk; raises SbkitError if the text is not spoken."""
        self.notes = await anext(self._parts)
        self._first_chunk: bytes = await anext(self._parts)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the chunks of the file."""
        async with aclosing(self._parts):
            yield self._first_chunk
            async for part in self._parts:
                if isinstance(part, bytes):
                    yield part
                else:
                    self.seconds = part


async def speech_response(request: SpeechRequest) -> StreamingResponse:
    """Return speech that is sent while it is made; raises ApiError if the text cannot be spoken."""
    parts = request.voice.speak(request.text, request.speed, request.response_format)
    speech = SpeechStream(parts)
    try:
        await speech.start()
    except SbkitError as error:
        raise ApiError(400, str(error), "input") from error
    if request.is_streamed:
        events = _speech_events(speech, num_characters=len(request.text))
        return StreamingResponse(events, media_type=EVENT_STREAM)
    headers: dict[str, str] = {}
    if speech.notes:
        headers[NOTES_HEADER] = _notes_header(speech.notes)
    media_type = FILE_FORMATS[request.response_format].media_type
    return StreamingResponse(_speech_file(speech), media_type=media_type, headers=headers)


def _notes_header(notes: Sequence[str]) -> str:
    """Write as many notes as fit into the header."""
    num_bytes = 0
    fitting: list[str] = []
    for note in notes:
        num_bytes += len(json.dumps(note)) + len(", ")
        if num_bytes > MAX_NOTES_BYTES:
            break
        fitting.append(note)
    return json.dumps(fitting)


async def _speech_file(speech: SpeechStream) -> AsyncIterator[bytes]:
    async with aclosing(speech.chunks()) as chunks:
        async for chunk in chunks:
            yield chunk
    request_facts.get()["audio_seconds"] = speech.seconds


async def _speech_events(speech: SpeechStream, num_characters: int) -> AsyncIterator[str]:
    """Yield server-sent events.

    The API counts tokens: here, the characters of the text and the seconds of the speech.
    """
    async with aclosing(speech.chunks()) as chunks:
        async for chunk in chunks:
            yield event("speech.audio.delta", audio=b64encode(chunk).decode())
    request_facts.get()["audio_seconds"] = speech.seconds
    num_seconds = math.ceil(speech.seconds)
    fields: JsonObject = {
        "usage": {
            "input_tokens": num_characters,
            "output_tokens": num_seconds,
            "total_tokens": num_characters + num_seconds,
        }
    }
    if speech.notes:
        fields["notes"] = speech.notes
    yield event("speech.audio.done", **fields)

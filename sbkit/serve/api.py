"""OpenAI's API: read the fields of requests, and write the answers.

Official fields that have no effect here are accepted and logged once; unknown ones are refused.
"""

import asyncio
import json
import math
import zlib
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sbkit.audio.containers import AudioError
from sbkit.audio.encode import FILE_FORMATS
from sbkit.audio.io import read_audio
from sbkit.base.messages import listed, nearest, note_once
from sbkit.decoding.hotwords import split_prompt
from sbkit.serve.middleware import (
    EVENT_STREAM,
    ApiError,
    Json,
    JsonObject,
    event,
    request_facts,
    wrong_field,
)
from sbkit.serve.recognition import RecognitionService, last_of
from sbkit.serve.tts import SpeechStream, Voice
from sbkit.tasks.asr.predict import EACH
from sbkit.tasks.asr.subtitles import group_words, to_srt, to_vtt
from sbkit.tasks.asr.transcript import Transcript
from sbkit.text.languages import language_code
from sbkit.text.normalization import join_segments
from sbkit.text.recognized_word import Word

STREAMED_FORMATS = ("json", "text")  # text that can be sent segment by segment, without word times
FILE_FIELD = "an audio file that is sent with a file name (curl: -F file=@talk.wav)"
FORM_LIMITS = {"max_fields": 100, "max_part_size": 1 << 20}  # bytes of a field
CLIENT_POLL_SECONDS = 0.5  # between two checks for a lost client
MAX_PROMPT_PHRASES = 100
MAX_SPEECH_BYTES = 1 << 16  # of a request; JSON may need twelve bytes for a character
OPENAI_MODELS: Mapping[type, Sequence[str]] = {
    RecognitionService: (
        *("gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", "whisper-1"),
        *("gpt-live-transcribe", "gpt-realtime-whisper"),
    ),
    Voice: ("gpt-4o-mini-tts", "tts-1", "tts-1-hd"),
}
# Voices of OpenAI's API; any of them stands for the model's own voice.
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


class AudioEncoding(NamedTuple):
    """How the audio of a session is encoded; ``subtype`` is the name in libsndfile."""

    subtype: str
    rate: int
    sample_bytes: int


AUDIO_ENCODINGS = {
    "audio/pcm": AudioEncoding("PCM_16", rate=24_000, sample_bytes=2),
    "audio/pcmu": AudioEncoding("ULAW", rate=8_000, sample_bytes=1),
    "audio/pcma": AudioEncoding("ALAW", rate=8_000, sample_bytes=1),
}
NO_EFFECT_NOTE = "note: `{}`, which a client sends, has no effect here."
NO_FIELD_NOTE = "`{}` is unknown here, and has no effect."
NOTES_HEADER = "X-Sbkit-Notes"  # a JSON list in ASCII; for server-sent events, in the last event
MAX_NOTES_BYTES = 2000  # of that header; proxies refuse large headers

PromptText = Annotated[str, Field(max_length=1 << 16)]
Result = TypeVar("Result")
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
    """All served bundles."""

    models: Sequence[ServedModel]
    aliases: Sequence[str] = ()  # of the first bundle of each class; by default, OpenAI's names

    @property
    def names(self) -> list[str]:
        """All names that clients may use."""
        names = [model.name for model in self.models]
        aliases = [self.aliases or OPENAI_MODELS[type(model.engine)] for model in self.models]
        return list(dict.fromkeys(chain(names, *aliases)))

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
        if name not in engines:
            aliases = self.aliases or OPENAI_MODELS[engine_class]
            if name and not is_among(name, aliases):
                raise unknown_model(name, [*engines, *aliases])
            name = next(iter(engines))
        request_facts.get({})["model"] = name
        return engines[name]

    def pick_recognizer(self, options: "TranscriptionOptions") -> RecognitionService:
        """Return the recognizer of options; raises ApiError for other languages than its own.

        A recognizer whose language is und (undetermined) accepts all languages.
        """
        recognizer = self.pick(RecognitionService, options.model)
        model_language = language_code(recognizer.language or "und")
        languages = (options.language, *options.languages)
        tags = [tag for language in languages if (tag := language.strip())]
        codes = {*map(language_code, tags)}
        if tags and model_language != "und" and not codes & {"auto", model_language}:
            raise wrong_field("language", f"{model_language}, the model's", listed(tags))
        return recognizer

    def pick_voice(self, model: str, voice: str | None) -> Voice:
        """Return the voice of a TTS model; raises ApiError.

        model: the name of a served model, or an alias.
        voice: one of OpenAI's names or None, which stand for the model's own voice. If ``model``
            is an alias, also the name of any served voice.
        """
        default_voice = self.pick(Voice, model)
        voice_names = list(self.engines(Voice))
        if model in voice_names:
            voice_names = [model]
        if voice in voice_names:
            return self.pick(Voice, voice)
        if voice is not None and voice not in OPENAI_VOICES:
            raise wrong_field("voice", " or ".join([*voice_names, "one of OpenAI's"]), voice)
        return default_voice


def is_among(name: str, names: Collection[str]) -> bool:
    """Return whether a name is among names, perhaps with a suffix (a date) of an OpenAI name."""
    official = {*chain(*OPENAI_MODELS.values())}.intersection(names)
    return name in names or any(name.startswith(f"{model}-") for model in official)


def unknown_model(name: str, served_names: Sequence[str]) -> ApiError:
    """Return the error about a model that is not served for this type of request."""
    message = "This server has no model for this request."
    if served_names:
        expected = listed(served_names, max_names=10)
        message = f"`model` must be one of {expected}, but is {name[:100]}."
    return ApiError(404, message, "model")


class Fields(BaseModel, extra="forbid"):
    """Fields of a request."""

    without_effect: ClassVar[Sequence[str]] = ()  # official fields that are accepted and dropped

    @classmethod
    def may_have(cls, name: str) -> bool:
        """Return whether a name is that of a field, or was probably meant to be."""
        fields = {*cls.model_fields, *cls.without_effect, "file"}
        return nearest(name.partition("[")[0], fields) is not None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, fields: Json) -> Json:
        """Drop null fields, except ``turn_detection``: null means that the client ends turns."""
        if not isinstance(fields, dict):
            return fields
        used_fields = {
            name: value
            for name, value in fields.items()
            if value is not None or name == "turn_detection"
        }
        for name in {*cls.without_effect} & {*used_fields}:
            note_once(NO_EFFECT_NOTE.format(name))
            del used_fields[name]
        return used_fields


ParsedFields = TypeVar("ParsedFields", bound=Fields)


def query_notes(
    request: HTTPConnection, fields_class: type[Fields], used: Collection[str] = ()
) -> list[str]:
    """Return notes about the parameters of a query, which have no effect, unless they are ``used``.

    Raises ApiError for those that were probably meant to have one.
    """
    names = [name for name in request.query_params if name not in used]
    for name in names:
        if fields_class.may_have(name):
            raise ApiError(400, f"`{name}` has no effect in a URL. Send it as a field.", name)
    return [NO_FIELD_NOTE.format(name) for name in names]


def parse_object(content: str | bytes) -> JsonObject:
    """Read a JSON object; raises ApiError for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "A request must be a JSON object.")
    return value


def parse_fields(fields_class: type[ParsedFields], fields: Json) -> ParsedFields:
    """Check the fields of a request; raises ApiError about the first invalid one."""
    try:
        return fields_class.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        name = [part for part in fault["loc"] if isinstance(part, str)][-1]
        if fault["type"] == "missing":
            raise ApiError(400, f"`{name}` is missing.", name) from None
        # A message without "should" is about an integer of thousands of digits.
        expected = fault["msg"].partition(" should ")[2] or "have fewer digits"
        if fault["type"] == "extra_forbidden":
            expected = "be left out, since it is unknown here"
        message = f"`{name}` must {expected}, but is {repr(fault['input'])[:100]}."
        raise ApiError(400, message, name) from None


class TranscriptionOptions(Fields):
    """The options of transcribing a file or a session."""

    without_effect: ClassVar[Sequence[str]] = ("delay",)
    model: str = ""
    language: str = ""
    languages: list[str] = []
    prompt: PromptText = ""
    keywords: Annotated[list[PromptText], Field(max_length=MAX_PROMPT_PHRASES)] = []

    @property
    def phrases(self) -> tuple[str, ...]:
        """The phrases that the decoder expects."""
        phrases = split_prompt("\n".join([self.prompt, *self.keywords]))
        return phrases[:MAX_PROMPT_PHRASES]


class TranscriptionFields(TranscriptionOptions):
    """The fields of a request for a transcript, besides its file."""

    without_effect = (
        *("chunking_strategy", "include", "known_speaker_names", "known_speaker_references"),
        "temperature",
    )
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = []  # of verbose_json
    stream: bool = False  # whether to send the text as events
    # Not in OpenAI's API, nor are the channels of words and segments. None: all are downmixed.
    channel: int | Literal["each"] | None = None

    @field_validator("channel", mode="before")
    @classmethod
    def _read_channel(cls, text: str) -> int | str:
        if text != EACH and not text.isdecimal():
            raise wrong_field("channel", "its number, counted from 0, or each", text)
        return text if text == EACH else int(text)

    @classmethod
    def parse(cls, form: FormData) -> Self:
        """Read a form; raises ApiError if the API does not allow a field."""
        if not isinstance(form.get("file"), UploadFile):
            actual = "text" if "file" in form else "missing"
            raise wrong_field("file", FILE_FIELD, actual)
        lists = [name for name, field in cls.model_fields.items() if field.default == []]
        fields: JsonObject = {name: [] for name in lists}
        for key, value in form.multi_items():
            name = key.partition("[")[0]  # clients write NAME[] for lists, NAME[KEY] for objects
            if name in lists:
                fields[name].append(value)
            elif name != "file" and value != "" and cls.may_have(name):
                fields[name] = value
        return parse_fields(cls, fields)

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.stream and self.response_format not in STREAMED_FORMATS:
            raise wrong_field("stream", f"false with {self.response_format}", "true")
        if self.stream and self.channel == EACH:
            raise wrong_field("stream", "false with `channel` each", "true")
        return self


class SpeechFields(Fields):
    """The fields of a request for speech."""

    without_effect = ("instructions",)
    model: str = ""
    voice: str | None = None
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    speed: Annotated[float, Field(ge=0.25, le=4)] = 1.0
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"

    @field_validator("voice", mode="before")
    @classmethod
    def _read_id(cls, voice: Json) -> Json:
        """Read a voice, which the API lets clients write as ``{"id": NAME}``."""
        return voice.get("id") if isinstance(voice, dict) else voice


class AudioFormat(Fields):
    """The format of the audio that a session receives."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int | None = None

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        rate = AUDIO_ENCODINGS[self.type].rate
        if self.rate not in (None, rate):
            raise wrong_field("rate", f"{rate} with {self.type}", str(self.rate))
        self.rate = rate
        return self


class TurnDetection(Fields):
    """How the server finds the end of a turn: always by silence."""

    without_effect = (
        *("create_response", "eagerness", "idle_timeout_ms", "interrupt_response"),
        *("prefix_padding_ms", "threshold"),
    )
    type: Literal["server_vad", "semantic_vad"] = "server_vad"
    silence_duration_ms: Annotated[int, Field(ge=1, le=60_000)] | None = None


class AudioInput(Fields):
    """The options of a realtime session."""

    without_effect: ClassVar[Sequence[str]] = ("noise_reduction",)
    format: AudioFormat = AudioFormat()
    transcription: TranscriptionOptions = TranscriptionOptions()
    turn_detection: TurnDetection | None = None  # None: the client ends turns

    @property
    def encoding(self) -> AudioEncoding:
        return AUDIO_ENCODINGS[self.format.type]

    @property
    def silence_seconds(self) -> float | None:
        """The silence that ends a turn; None if only the client ends turns."""
        if self.turn_detection is None or self.turn_detection.silence_duration_ms is None:
            return None
        return self.turn_detection.silence_duration_ms / 1000

    def choose_recognizer(self, models: ServedModels, default_model: str) -> RecognitionService:
        """Return the recognizer, and write it and its default silence into the options.

        default_model: the model that the client named when it connected.
        """
        model = self.transcription.model or default_model
        self.transcription = self.transcription.model_copy(update={"model": model})
        recognizer = models.pick_recognizer(self.transcription)
        silence, detection = recognizer.silence, self.turn_detection
        if "turn_detection" not in self.model_fields_set and silence is not None:
            detection = TurnDetection()
        if detection is not None:
            if silence is None:
                expected = "null, since the model takes whole clips"
                raise wrong_field("turn_detection", expected, detection.type)
            if detection.type == "semantic_vad":
                note_once(NO_EFFECT_NOTE.format(detection.type))
            ms = detection.silence_duration_ms or round(1000 * silence)
            detection = TurnDetection(silence_duration_ms=ms)
        self.turn_detection = detection
        return recognizer


class SessionAudio(Fields):
    """The audio of a session."""

    input: AudioInput = AudioInput()


class SessionFields(Fields):
    """The fields of a session that a client can change."""

    without_effect = ("include",)
    type: Literal["transcription"] = "transcription"
    audio: SessionAudio = SessionAudio()


class ClientEvent(Fields):
    """An event of a realtime session, with the fields of all its types."""

    type: Literal[
        "session.update",
        "input_audio_buffer.append",
        "input_audio_buffer.commit",
        "input_audio_buffer.clear",
    ]
    session: JsonObject = {}
    audio: str = ""  # in base64


class _FormParser(MultiPartParser):
    """Take a part with `filename*` alone for a file, as versions of urllib3 before 1.25 send it."""

    def on_header_end(self) -> None:
        value = self._current_partial_header_value  # private, as in starlette 1.10
        if b"filename=" not in value:
            self._current_partial_header_value = value.replace(b"filename*=", b"filename=")
        super().on_header_end()


async def _read_form(request: Request, max_files: int) -> FormData:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return FormData()
    try:
        async with aclosing(request.stream()) as stream:
            limits = {**FORM_LIMITS, "max_files": max_files}
            return await _FormParser(request.headers, stream, **limits).parse()
    except MultiPartException as error:
        raise ApiError(400, f"The API does not accept this request: {error.message}") from None


async def answer_transcription(models: ServedModels, request: Request) -> Response:
    """Transcribe the file of a form."""
    notes = query_notes(request, TranscriptionFields)
    engines = models.engines(RecognitionService).values()
    fields_by_engine = [engine.side_fields.values() for engine in engines]
    max_files = 1 + max(
        (sum(f.kind == "audio" for f in fields) for fields in fields_by_engine), default=0
    )
    try:
        form = await _read_form(request, max_files)
    except OSError as error:
        reason = error.strerror
        raise ApiError(503, f"The server cannot store the file ({reason}).") from error
    try:
        fields = TranscriptionFields.parse(form)
        recognizer = models.pick_recognizer(fields)
        row = await _read_row(form, recognizer)
    except ApiError:
        await form.close()
        raise
    file = cast(UploadFile, form["file"]).file  # closed by the recognizer
    response = await _until_disconnected(request, _transcription(fields, file, recognizer, row))
    names = [name for name in form if name not in row]
    notes += [NO_FIELD_NOTE.format(name) for name in names if not fields.may_have(name)]
    if notes:
        response.headers[NOTES_HEADER] = _notes_header(notes)
    return response


async def _read_row(form: FormData, recognizer: RecognitionService) -> dict[str, Any]:
    """Read what a recognizer takes beside audio from the fields of a form."""
    row: dict[str, Any] = {}
    for name, declared in recognizer.side_fields.items():
        value = form.get(name)
        if value is None and declared.default is None:
            raise ApiError(400, f"`{name}` is missing.", name)
        # A path in a request would be one of this server's.
        if value is not None and isinstance(value, UploadFile) != (declared.kind == "audio"):
            expected = FILE_FIELD if declared.kind == "audio" else "a text"
            raise wrong_field(name, expected, "text" if isinstance(value, str) else "a file")
        if isinstance(value, UploadFile):
            decode = partial(read_audio, value.file, recognizer.sample_rate)
            try:
                row[name] = await asyncio.to_thread(decode)
            except AudioError as error:
                raise ApiError(422, str(error), name) from None
            finally:
                await value.close()
        elif value is not None:
            row[name] = value
    return row


async def _until_disconnected(request: Request, result: Awaitable[Result]) -> Result:
    """Wait for a result as long as the client does; raises ClientDisconnect."""
    work = asyncio.ensure_future(result)
    try:
        while not (await asyncio.wait((work,), timeout=CLIENT_POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        await asyncio.wait((work,))


async def _transcription(
    fields: TranscriptionFields,
    file: BinaryIO,
    recognizer: RecognitionService,
    row: Mapping[str, Any],
) -> Response:
    """Transcribe a file, and return its text as requested."""
    needs_word_times = fields.response_format not in STREAMED_FORMATS
    results = recognizer.transcribe(
        file, times=needs_word_times, phrases=fields.phrases, channel=fields.channel, row=row
    )
    if fields.stream:
        first_result = await anext(results)  # if it fails, the answer still has the error's status
        events = _transcript_events(first_result, results)
        return StreamingResponse(events, media_type=EVENT_STREAM)
    transcript = await last_of(results)
    request_facts.get()["audio_seconds"] = transcript.seconds
    if needs_word_times and transcript.text and not transcript.words:
        raise ApiError(400, "This model does not time words.", "response_format")
    match fields.response_format:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(to_srt(transcript.words, spaces=transcript.spaces))
        case "vtt":
            return PlainTextResponse(to_vtt(transcript.words, spaces=transcript.spaces))
    usage = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
    content: JsonObject = {"text": transcript.text, "usage": usage}
    if fields.response_format == "verbose_json":
        content["duration"] = round(transcript.seconds, 3)
        granularities = fields.timestamp_granularities or ["segment"]
        if "segment" in granularities:
            spaces = transcript.spaces
            groups = enumerate(group_words(transcript.words, spaces=spaces))
            content["segments"] = [_segment(index, words, spaces) for index, words in groups]
        if "word" in granularities:
            content["words"] = words_of(transcript.words)
        content["task"] = "transcribe"
        content["language"] = recognizer.language or "und"
    return JSONResponse(content)


async def _transcript_events(
    result: str | Transcript, further_results: AsyncGenerator[str | Transcript]
) -> AsyncGenerator[str]:
    """Yield the texts of segments and their transcript as server-sent events."""
    async with aclosing(further_results):
        while not isinstance(result, Transcript):
            if result:
                yield event("transcript.text.delta", delta=result)
            result = await anext(further_results)
        request_facts.get()["audio_seconds"] = result.seconds
        yield event("transcript.text.done", text=result.text)


def words_of(words: Sequence[Word]) -> list[JsonObject]:
    """Return timed words in the form of the API, which calls their text ``word``."""
    return [{"word": fields.pop("text"), **fields} for fields in map(Word.plain, words)]


def _segment(index: int, words: Sequence[Word], spaces: bool) -> JsonObject:
    """Describe the words of a subtitle.

    CTC has no value for some fields of the API. They get the value that clear speech has.
    """
    text = join_segments((word.text for word in words), spaces=spaces)
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
    } | ({} if words[0].channel is None else {"channel": words[0].channel})


async def answer_speech(models: ServedModels, request: Request) -> Response:
    """Speak a text."""
    notes = query_notes(request, SpeechFields)
    fields = parse_fields(SpeechFields, parse_object(await request.body()))
    voice = models.pick_voice(fields.model, fields.voice)
    return await _until_disconnected(request, _speech(fields, voice, notes))


async def _speech(
    fields: SpeechFields, voice: Voice, query_notes: Sequence[str]
) -> StreamingResponse:
    """Return speech as it is synthesized; raises ApiError if the text cannot be spoken."""
    speech = voice.speak(fields.input, fields.speed, fields.response_format)
    notes = [*query_notes, *await anext(speech)]
    first_chunk: bytes = await anext(speech)
    chunks = _speech_chunks(first_chunk, speech)
    if fields.stream_format == "sse":
        events = _speech_events(chunks, notes, num_characters=len(fields.input))
        return StreamingResponse(events, media_type=EVENT_STREAM)
    headers = {NOTES_HEADER: _notes_header(notes)} if notes else {}
    media_type = FILE_FORMATS[fields.response_format].media_type
    return StreamingResponse(chunks, media_type=media_type, headers=headers)


def _notes_header(notes: Sequence[str]) -> str:
    """Write as many notes as fit into the header."""
    while len(header := json.dumps(notes)) > MAX_NOTES_BYTES:
        notes = notes[:-1]
    return header


async def _speech_chunks(first_chunk: bytes, speech: SpeechStream) -> AsyncGenerator[bytes]:
    """Yield the chunks of a file; log its seconds."""
    async with aclosing(speech):
        yield first_chunk
        async for chunk in speech:
            if isinstance(chunk, bytes):
                yield chunk
            else:
                request_facts.get()["audio_seconds"] = chunk


async def _speech_events(
    chunks: AsyncGenerator[bytes], notes: Sequence[str], num_characters: int
) -> AsyncGenerator[str]:
    """Yield server-sent events.

    The API counts tokens. Here, these are characters of the text and seconds of speech.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            yield event("speech.audio.delta", audio=b64encode(chunk).decode())
    num_seconds = math.ceil(request_facts.get()["audio_seconds"])
    usage = {
        "input_tokens": num_characters,
        "output_tokens": num_seconds,
        "total_tokens": num_characters + num_seconds,
    }
    yield event("speech.audio.done", usage=usage, **({"notes": notes} if notes else {}))

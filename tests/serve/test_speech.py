"""Speech requests of OpenAI's client; a recognizer of the same server transcribes the answers."""

import base64
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from sbkit.audio.encode import FileWriter
from sbkit.runtime.clients import Workers
from sbkit.serve.api import ServedModel, ServedModels, SpeechFields, parse_fields
from sbkit.serve.middleware import ApiError, Metrics
from sbkit.serve.tts import Voice
from sbkit.tasks.tts.predict import Speech
from tests.runtime.tones import LETTER, RATE, STEP
from tests.serve.server import RunningServer, ToneSpeaker, wait_for, wav

TEXT = "the quick brown fox"
SPEECH = "/v1/audio/speech"


def create(server: RunningServer, text: str, **more: Any) -> Any:
    client: Any = server.openai.audio.speech
    return client.create(**{"model": "anna", "voice": "alloy", "input": text, **more})


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_speech_in_each_format_is_understood(server: RunningServer, format: str) -> None:
    answer = create(server, f"{TEXT}. a lazy dog.", response_format=format)
    media_type = {"mp3": "mpeg", "opus": "ogg"}.get(format, format)
    assert answer.response.headers["content-type"] == f"audio/{media_type}"
    content = answer.content
    if format == "wav":  # it declares no length
        assert content[4:8] == content[40:44] == b"\xff" * 4
        assert soundfile.info(io.BytesIO(content)).samplerate == 24_000
    if format == "pcm":
        content = wav(np.frombuffer(content, "<i2"), 24_000)
    letters = len(f"{TEXT}a lazy dog")
    with av.open(io.BytesIO(content)) as file:
        (stream,) = file.streams.audio
        signal = np.concatenate([frame.to_ndarray().ravel() for frame in file.decode(stream)])
    seconds = len(signal) / stream.rate
    assert seconds == pytest.approx(letters * LETTER * STEP / RATE, abs=0.1)
    if format in ("mp3", "opus", "aac"):  # mp3 and aac start 40 ms late, and opus has echoes
        assert 0.01 < np.square(signal).mean() < 0.03
        return
    answer = server.openai.audio.transcriptions.create(model="tones", file=("speech", content))
    assert answer.text.replace(" ", "") == f"{TEXT}a lazy dog".replace(" ", "")


def test_speech_is_sent_sentence_by_sentence(server: RunningServer) -> None:
    fields = {"model": "anna", "input": f"{TEXT}. a lazy dog.", "response_format": "pcm"}
    fields |= {"stream_format": "sse", "voice": {"id": "anna"}, "speed": 2}
    with server.client.stream("POST", SPEECH, json=fields) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    *deltas, completed = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert len(deltas) >= 2
    samples = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    letters = len(f"{TEXT}a lazy dog")
    assert len(samples) / 48_000 == letters * LETTER * STEP / RATE / 2
    usage = {"input_tokens": 32, "output_tokens": 2, "total_tokens": 34}
    assert completed == {"type": "speech.audio.done", "usage": usage}


BAD_REQUESTS: dict[str, tuple[int, str, Any]] = {  # with fields, or a body as it is
    "no text": (400, "`input` must have at least 1 character, but is ''", {"input": ""}),
    "a long text": (400, "`input` must have at most 4096 characters", {"input": "a" * 4097}),
    "nothing to say": (400, "Only letters can be spoken", {"input": "123"}),
    "a recognizer": (404, "anna, gpt-4o-mini-tts, tts", {"model": "tones"}),
    "another voice": (400, "`voice` must be anna or one of OpenAI's", {"voice": "bob"}),
    "a list for a voice": (400, "`voice` must be", {"voice": ["anna"]}),
    "400 digits": (400, "must be a valid number, but is 1000", {"speed": 10**400}),
    "no number": (400, "or equal to 4, but is nan", {"speed": math.nan}),
    "a list": (400, "must be a JSON object", b"[]"),
    "half an object": (400, "must be a JSON object", b"{"),
    "a long body": (413, "more than 0.065536 MB", b'"' + b"a" * 70_000 + b'"'),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_speech_requests_get_a_clear_error(server: RunningServer, name: str) -> None:
    status, words, content = BAD_REQUESTS[name]
    if isinstance(content, dict):
        content = json.dumps({"model": "anna", "voice": "alloy", "input": "a fox", **content})
    answer = server.client.post(SPEECH, content=content)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert create(server, "a fox").content


def test_voice_is_chosen_by_model_or_voice_name() -> None:
    workers, speaker = Workers(1), ToneSpeaker(None)
    anna, bob = (Voice(speaker, workers=workers, metrics=Metrics()) for _ in range(2))
    bundles = [ServedModel(name="anna", engine=anna), ServedModel(name="bob", engine=bob)]
    models = ServedModels(models=bundles)

    def parse(**fields: object) -> Voice:
        speech = parse_fields(SpeechFields, {"input": "a fox", **fields})
        return models.pick_voice(speech.model, speech.voice)

    assert parse() is parse(model="tts-1", voice="alloy") is parse(model="anna") is anna
    assert parse(model="bob", voice="alloy") is parse(model="tts-1", voice="bob") is bob
    assert parse(voice={"id": "bob"}, speed=None) is bob
    assert parse(speed=0.25) is parse(speed=4) is anna
    with pytest.raises(ApiError, match="`voice` must be anna or one of OpenAI's, but is bob"):
        parse(model="anna", voice="bob")
    workers.close()


def test_notes_fit_the_header_and_events_have_all(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [letter * 498 for letter in "abcd"]  # with quotes and a comma, 502 bytes each
    audio = np.zeros(RATE, np.float32)
    monkeypatch.setattr(ToneSpeaker, "stream", lambda *_, **__: Speech(iter([audio]), notes))
    assert json.loads(create(server, TEXT).response.headers["X-Sbkit-Notes"]) == notes[:3]
    lines = create(server, TEXT, stream_format="sse").text.splitlines()
    assert json.loads(lines[-2].removeprefix("data: "))["notes"] == notes


def test_lost_client_ends_speech(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks = 0

    def endless() -> Iterator[Any]:
        nonlocal num_blocks
        while True:
            num_blocks += 1
            yield np.zeros(RATE, np.float32)

    writers: list[FileWriter] = []

    def open_writer(*fields: Any) -> FileWriter:
        writers.append(FileWriter(*fields))
        return writers[-1]

    monkeypatch.setattr("sbkit.serve.tts.FileWriter", open_writer)
    monkeypatch.setattr(ToneSpeaker, "stream", lambda *_, **__: Speech(endless(), ()))
    with server.client.stream("POST", SPEECH, json={"input": "a", "response_format": "pcm"}) as pcm:
        next(pcm.iter_bytes())
    wait_for(lambda: server.service.in_flight == 0)
    wait_for(lambda: not writers[0].file.streams)  # it is closed
    before = server.metric("sbkit_speech_seconds_total")
    assert before >= num_blocks - 1
    assert server.post(server.say("a fox")).json()["text"] == "a fox"
    assert server.metric("sbkit_speech_seconds_total") <= before + 1

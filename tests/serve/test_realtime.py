"""Realtime sessions: each client gets the text of its own turns."""

import base64
import io
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from sbkit.audio.io import Samples
from sbkit.serve.realtime import Item
from sbkit.tasks.asr.session import Final
from sbkit.tasks.vad.predict import SpeechRules, VoiceDetector
from tests.runtime.scripted_speech import LoudSpeech
from tests.runtime.tones import (
    RATE,
    StreamingToneModel,
    UnsureModel,
    silence,
    speak,
    streaming_bundle,
    tone_bundle,
)
from tests.serve.server import RunningServer, handshake, running_server, wait_for

TEXT = "the quick brown fox"
pytestmark = pytest.mark.timeout(60)  # an event may never arrive


@pytest.fixture(scope="module")
def clip_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("whole")
    with running_server(folder, second=tone_bundle(folder / "second")) as server:
        yield server


def at_24k(samples: Samples) -> bytes:
    signal = soxr.resample(samples.astype(np.float32), 2, 3)
    return np.rint(signal).clip(-32768, 32767).astype("<i2").tobytes()


def send(session: Any, audio: bytes, *, blocks: int = 7) -> None:
    for block in np.array_split(np.frombuffer(audio, "<i2"), blocks):
        session.input_audio_buffer.append(audio=base64.b64encode(block.tobytes()).decode())


def until(session: Any, end: str) -> list[Any]:
    events = [session.recv()]
    while not events[-1].type.endswith(end):
        events.append(session.recv())
    return events


def say(session: Any, audio: bytes, *, blocks: int = 7) -> str:
    """Send a turn, which the client ends, and return its transcript."""
    set_input(session, turn_detection=None)
    send(session, audio, blocks=blocks)
    session.input_audio_buffer.commit()
    return str(until(session, "completed")[-1].transcript)


def set_input(session: Any, **fields: Any) -> None:
    session.session.update(session={"type": "transcription", "audio": {"input": fields}})


@pytest.mark.parametrize("kind", ["server", "clip_server"])
def test_turn_ends_when_the_client_commits(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(kind)
    with server.openai.realtime.connect(extra_query={"intent": "transcription"}) as session:
        created = session.recv()
        assert created.type == "session.created"
        assert created.session.type == "transcription"
        set_input(session, turn_detection=None)
        assert session.recv().session.audio.input.turn_detection is None
        previous = None
        for text in (TEXT, "a lazy dog"):
            send(session, at_24k(speak(server.tokenizer, text)))
            session.input_audio_buffer.commit()
            events = until(session, "completed")
            *_, completed = events
            assert completed.transcript == text
            assert completed.usage.seconds == pytest.approx(0.12 * len(text), abs=0.01)
            assert [word["word"] for word in completed.words] == text.split()
            deltas = [event.delta for event in events if event.type.endswith("delta")]
            assert "".join(deltas) == text
            assert (len(list(filter(None, deltas))) > 1) == (kind == "server")
            (committed,) = [event for event in events if event.type.endswith("committed")]
            assert (committed.previous_item_id, committed.item_id) == (previous, completed.item_id)
            previous = completed.item_id


def test_turn_joins_utterances_as_transcripts_are_written() -> None:
    final = Final(seconds=1.0, text="我爱北京", start=0.0, end=1.0, words=())
    for spaces, text in ((False, "我爱北京天安门"), (True, "我爱北京 天安门")):
        assert Item(0.0, spaces, [final]).text("天安门") == text


def test_turn_ends_at_an_endpoint(server: RunningServer) -> None:
    texts = (TEXT, "a lazy dog")
    spoken = [part for text in texts for part in (speak(server.tokenizer, text), silence(1.3))]
    with server.openai.realtime.connect() as session:
        detection = session.recv().session.audio.input.turn_detection
        assert (detection.type, detection.silence_duration_ms) == ("server_vad", 1200)
        send(session, at_24k(np.concatenate([silence(1.0), *spoken, silence(0.64)])))
        begin = 1.0
        for text in texts:
            started, *deltas, stopped, committed, completed = until(session, "completed")
            assert started.type.endswith("speech_started")
            assert {event.type.rpartition(".")[2] for event in deltas} == {"delta"}
            assert stopped.type.endswith("speech_stopped") and committed.type.endswith("committed")
            assert len({part.item_id for part in (started, *deltas, stopped, completed)}) == 1
            assert completed.transcript == deltas[-1].hypothesis == text
            assert completed.words[0]["start"] == pytest.approx(begin, abs=0.06)
            end = begin + 0.12 * len(text)
            assert begin < started.audio_start_ms / 1000 < end + 0.7
            assert stopped.audio_end_ms / 1000 == pytest.approx(end + 1.2, abs=0.1)
            begin = end + 1.3
        session.input_audio_buffer.clear()
        assert session.recv().type == "input_audio_buffer.cleared"
        set_input(session, turn_detection={"type": "server_vad", "silence_duration_ms": 400})
        assert session.recv().session.audio.input.turn_detection.silence_duration_ms == 400
        send(session, at_24k(np.concatenate([speak(server.tokenizer, TEXT), silence(1.2)])))
        assert until(session, "completed")[-1].transcript == TEXT


@pytest.mark.parametrize(("kind", "quiet"), [("live", 0.2), ("clip_server", 2.0)])
def test_turn_ends_when_a_detector_finds_silence(kind: str, quiet: float, tmp_path: Path) -> None:
    texts, tones = (TEXT, "a lazy dog"), streaming_bundle(tmp_path) if kind == "live" else None
    # so padded, turns begin with the frame of a tone
    detector = VoiceDetector(LoudSpeech(), SpeechRules(padding=0.06))
    with running_server(tmp_path, tones=tones, detector=detector) as server:
        spoken = [part for text in texts for part in (speak(server.tokenizer, text), silence(0.8))]
        audio = at_24k(np.concatenate([silence(quiet), *spoken]))
        for blocks in (1, 40):
            with server.openai.realtime.connect() as session:
                detection = session.recv().session.audio.input.turn_detection
                assert (detection.type, detection.silence_duration_ms) == ("server_vad", 500)
                send(session, audio, blocks=blocks)
                begin = quiet
                for text in texts:
                    started, *_, completed = events = until(session, "completed")
                    end = begin + 0.12 * len(text)
                    assert started.type == "input_audio_buffer.speech_started"
                    assert started.audio_start_ms / 1000 == pytest.approx(begin - 0.06, abs=0.01)
                    (stopped,) = [event for event in events if event.type.endswith("stopped")]
                    assert stopped.audio_end_ms / 1000 == pytest.approx(end + 0.06, abs=0.01)
                    assert completed.transcript == text
                    assert completed.words[0]["start"] == pytest.approx(begin, abs=0.06)
                    begin = end + 0.8
                session.input_audio_buffer.commit()
                assert "0.1 s of audio" in until(session, "error")[-1].error.message
                begin = len(audio) / 48_000
                send(session, at_24k(speak(server.tokenizer, TEXT)))
                until(session, "speech_started")
                session.input_audio_buffer.clear()
                until(session, "cleared")
                begin += 0.12 * len(TEXT) + quiet
                send(session, audio[: round(48_000 * (quiet + 0.12 * len(TEXT) + 0.8))])
                completed = until(session, "completed")[-1]
                assert completed.transcript == TEXT
                assert completed.words[0]["start"] == pytest.approx(begin, abs=0.06)


def test_turn_that_its_client_does_not_end_is_cut_at_its_limit(tmp_path: Path) -> None:
    """Neither 20 s nor a pause end it; the last words before the limit are in the next turn."""
    words = ["the quick brown fox jumps over a lazy dog"] * 5
    with (
        running_server(tmp_path, tones=streaming_bundle(tmp_path), max_turn_seconds=23.0) as server,
        server.openai.realtime.connect() as session,
    ):
        set_input(session, turn_detection=None)
        spoken = speak(server.tokenizer, " ".join(words))
        send(session, at_24k(np.insert(spoken, 10 * RATE, silence(1.5))))
        *_, committed = until(session, "committed")
        assert committed.reason == "max_turn_seconds"
        cut = until(session, "completed")[-1]
        assert (cut.item_id, cut.reason) == (committed.item_id, "max_turn_seconds")
        assert 18.5 < cut.usage.seconds <= 23.0
        session.input_audio_buffer.commit()
        events = until(session, "completed")
        (committed,) = [event for event in events if event.type.endswith("committed")]
        assert committed.previous_item_id == cut.item_id and not hasattr(committed, "reason")
        assert f"{cut.transcript} {events[-1].transcript}".split() == " ".join(words).split()
        assert events[-1].words[0]["start"] >= cut.usage.seconds - 0.01


@pytest.mark.parametrize(
    ("kind", "rate", "subtype"),
    [("audio/pcm", 24_000, "PCM_16"), ("audio/pcmu", 8000, "ULAW"), ("audio/pcma", 8000, "ALAW")],
)
def test_session_takes_each_format_in_any_base64_and_in_odd_numbers_of_bytes(
    server: RunningServer, kind: str, rate: int, subtype: str
) -> None:
    """Half a sample waits for its other byte, but not beyond the end of a turn."""
    text = "a rude bird"  # all its letters have tones below 4 kHz
    signal = soxr.resample(speak(server.tokenizer, text) / np.float32(32768), RATE, rate)
    soundfile.write(file := io.BytesIO(), signal, rate, format="RAW", subtype=subtype)
    audio = file.getvalue() + b"x"
    with server.openai.realtime.connect() as session:
        set_input(session, format={"type": kind}, turn_detection=None)
        for encode in (base64.encodebytes, base64.urlsafe_b64encode, base64.b64encode):
            session.input_audio_buffer.append(audio="eA")
            session.input_audio_buffer.clear()
            for start in range(0, len(audio), 997):
                block = encode(audio[start : start + 997]).decode()
                session.input_audio_buffer.append(audio=block.rstrip("="))
            session.input_audio_buffer.commit()
            assert until(session, "completed")[-1].transcript == text


def test_concurrent_sessions_share_batches_and_get_their_own_texts(server: RunningServer) -> None:
    words = TEXT.split()
    texts = [f"{words[n % 4]} {words[n // 4]} {words[n % 3]}" for n in range(16)]
    server.model.batches.clear()

    def say_alone(text: str) -> str:
        with server.openai.realtime.connect() as session:
            return say(session, at_24k(speak(server.tokenizer, text)))

    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(say_alone, texts)) == texts
    assert max(map(len, server.model.batches)) > 1
    assert server.metric("sbkit_sessions_total") >= 16
    assert server.metric("sbkit_audio_seconds_total") > 16
    wait_for(lambda: server.metric("sbkit_sessions_open") == 0)


def update(**fields: Any) -> str:
    return json.dumps({"type": "session.update", "session": {"audio": {"input": fields}}})


def append(audio: Any) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


BAD_EVENTS: dict[str, tuple[str | bytes, str]] = {
    "audio as it is": (b"\0" * 960, "JSON in a text frame, but is binary; append audio in base64"),
    "deep JSON": ("[" * 100_000, "JSON object"),
    "no type": ("{}", "`type` is missing"),
    "another event": (json.dumps({"type": "response.create"}), "but is 'response.create'"),
    "no base64": (append("?" * 8), "`audio` must be base64"),
    "too little": (json.dumps({"type": "input_audio_buffer.commit"}), "0.1 s of audio"),
    "another rate": (update(format={"type": "audio/pcm", "rate": 16000}), "must be 24000"),
    "another format": (update(format={"type": "audio/opus"}), "'audio/pcm', 'audio/pcmu' or"),
    "another model": (update(transcription={"model": "tones-2"}), "one of tones, gpt-"),
    "another language": (update(transcription={"language": "fr"}), "`language` must be en"),
    "a long silence": (update(turn_detection={"silence_duration_ms": 60_001}), "or equal to 60000"),
    "infinity": (update(turn_detection={"silence_duration_ms": math.inf}), "a finite number"),
    "half a character": ('{"type": "\\ud800", "event_id": "\\ud800"}', "a valid string"),
    "an unknown field": (update(turn_detection={"patience": "low"}), "`patience` must be left"),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_bad_events_get_clear_errors_and_the_session_goes_on(
    server: RunningServer, name: str
) -> None:
    event, words = BAD_EVENTS[name]
    with server.openai.realtime.connect() as session:
        set_input(session, turn_detection=None)
        until(session, "updated")
        session._connection.send(event)
        (error,) = until(session, "error")
        assert words in error.error.message
        assert error.error.type == "invalid_request_error"
        assert say(session, at_24k(speak(server.tokenizer, "a fox"))) == "a fox"


def test_session_is_updated_between_turns(server: RunningServer) -> None:
    with server.openai.realtime.connect() as session:
        set_input(session, turn_detection=None)
        send(session, at_24k(speak(server.tokenizer, "a fox")), blocks=1)
        fields = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}, "type": "transcription"}
        session.session.update(session=fields, event_id="mine")
        error = until(session, "error")[-1].error
        assert error.event_id == "mine" and "Commit or clear the audio first" in error.message
        session.input_audio_buffer.commit()
        assert until(session, "completed")[-1].transcript == "a fox"
        for num_samples in range(2400, 2406):  # also no whole number at the rate of the model
            for end, event in (("commit", "completed"), ("clear", "cleared")):
                set_input(session, turn_detection=None)
                until(session, "updated")
                send(session, bytes(2 * num_samples), blocks=1)
                getattr(session.input_audio_buffer, end)()
                until(session, event)


def test_whole_clip_model_refuses_turn_detection(clip_server: RunningServer) -> None:
    with clip_server.openai.realtime.connect(model="second") as session:
        assert session.recv().session.audio.input.turn_detection is None
        set_input(session, transcription={"model": None})  # that of the connection
        assert session.recv().session.audio.input.transcription.model == "second"
        set_input(session, turn_detection={"type": "server_vad"})
        assert "null, since the model takes whole clips" in session.recv().error.message


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("live", {"max_seconds": 2.0}), ("clips", {"max_seconds": 2.0}), ("live", {"max_mb": 0.064})],
)
def test_turn_has_a_longest_duration(kind: str, limit: dict[str, float], tmp_path: Path) -> None:
    """The limit is in seconds, or in the bytes of a file at 16 kHz."""
    tones = streaming_bundle(tmp_path) if kind == "live" else None
    with (
        running_server(tmp_path, tones=tones, **limit) as server,
        server.openai.realtime.connect() as session,
    ):
        set_input(session, turn_detection=None)
        send(session, at_24k(silence(3.2)), blocks=1)
        assert "more than 2 s of audio in a turn" in until(session, "error")[-1].error.message
        session.input_audio_buffer.commit()
        end = "completed" if kind == "live" else "failed"
        assert until(session, end)


def test_sessions_are_refused_before_they_open(tmp_path: Path) -> None:
    with running_server(tmp_path, max_sessions=1) as server:
        with server.openai.realtime.connect():
            answer = handshake(server)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        wait_for(lambda: server.service.sessions == 0)
        server.service.is_ready = False
        assert handshake(server).status_code == 503


def test_too_large_message_closes_only_its_session(server: RunningServer) -> None:
    with server.openai.realtime.connect() as session, server.openai.realtime.connect() as other:
        with pytest.raises(ConnectionClosedError) as closed:
            session._connection.send(append("A" * (17 << 20)))
            until(session, "never")
        if (message := closed.value.rcvd) is not None:  # a client that still sends may not read it
            assert (message.code, "limit" in message.reason) == (1009, True)
        assert say(other, at_24k(speak(server.tokenizer, "a fox"))) == "a fox"


def test_fault_of_the_model_ends_the_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tmp_path, tones=streaming_bundle(tmp_path)) as server:
        server.model.advance = lambda *_: 1 // 0  # type: ignore[attr-defined]
        with server.openai.realtime.connect() as session:
            with suppress(ConnectionClosed):  # the server may close before all is sent
                send(session, at_24k(speak(server.tokenizer, TEXT)))
            error = until(session, "error")[-1].error
            assert (error.type, "ZeroDivision" in error.message) == ("server_error", False)
            with pytest.raises(ConnectionClosedError, match="1011"):
                session.recv()
        wait_for(lambda: "ZeroDivisionError" in caplog.text)


class UnsureStreamingModel(UnsureModel, StreamingToneModel):
    """An `UnsureModel` that runs chunk by chunk."""


def test_session_prompt_is_expected_by_the_decoder(tmp_path: Path) -> None:
    tones = tone_bundle(tmp_path, model_class=UnsureStreamingModel, lm_texts=[TEXT])
    with (
        running_server(tmp_path, tones=tones) as server,
        server.openai.realtime.connect() as session,
    ):
        texts: list[str] = []
        for expected in ({}, {"prompt": "We speak of: cog"}, {"keywords": ["cog"]}):
            set_input(session, transcription=expected)
            texts.append(say(session, at_24k(speak(server.tokenizer, "dog"))))
    assert texts == ["dog", "cog", "cog"]

"""Home Assistant's protocol: recognition and speech for the client of the package `wyoming`."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import uvicorn

from sbkit.audio.encode import FILE_RATE
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run
from sbkit.serve.middleware import Limits
from tests.runtime.tones import RATE, speak, streaming_bundle, tone_bundle
from tests.serve.server import RunningServer, ToneSpeaker, running_server, wait_for, wav

pytest.importorskip("wyoming", reason="needs the extra wyoming")
from wyoming.asr import Transcribe
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info
from wyoming.ping import Ping
from wyoming.tts import Synthesize, SynthesizeVoice

TEXT = "the quick brown fox"
DEEP = b"[" * 500_000 + b"\n"


class Raw(Eventable):
    """An event without data."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def event(self) -> Event:
        return Event(self.kind)

    @staticmethod
    def is_type(event_type: str) -> bool:
        return True

    @staticmethod
    def from_event(event: Event) -> "Raw":
        return Raw(event.type)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("wyoming")
    options = {"speaker": ToneSpeaker, "language": "en", "speaks_wyoming": True}
    tones, second = streaming_bundle(folder), tone_bundle(folder / "second")
    with running_server(folder, tones=tones, second=second, max_seconds=9.0, **options) as server:
        yield server


def ask(server: RunningServer, events: Sequence[Eventable], end: str) -> list[Event]:
    """Send events; return those of the answer up to one of a type, or to an error."""

    async def answers() -> list[Event]:
        received: list[Event] = []
        async with AsyncTcpClient("127.0.0.1", server.wyoming_port or 0) as client:
            for event in events:
                await client.write_event(event.event())
            while not received or received[-1].type not in (end, "error"):
                event = await client.read_event()
                assert event is not None, received
                received.append(event)
            if received[-1].type == "error":  # which Home Assistant skips
                assert await client.read_event() is None
        return received

    return asyncio.run(asyncio.wait_for(answers(), 30))


def clip(server: RunningServer, text: str, *, stereo: bool = False) -> list[Eventable]:
    samples = speak(server.tokenizer, text)
    if stereo:
        samples = np.stack([samples, samples], 1).ravel()
    form = {"rate": RATE, "width": 2, "channels": 1 + stereo}
    content = samples.tobytes()
    blocks = [content[start : start + 2048] for start in range(0, len(content), 2048)]
    return [AudioStart(**form), *(AudioChunk(audio=block, **form) for block in blocks), AudioStop()]


def test_models_voices_and_languages_are_described(server: RunningServer) -> None:
    info = Info.from_event(ask(server, [Describe()], "info")[0])
    (asr,), (tts,) = info.asr, info.tts
    languages = {model.name: model.languages for model in asr.models}
    assert [*languages.items()] == [("tones", ["en"]), ("second", ["und"])]
    assert asr.supports_transcript_streaming
    assert [(voice.name, voice.languages) for voice in tts.voices] == [("anna", ["en"])]


def test_live_model_sends_text_while_it_is_spoken(server: RunningServer) -> None:
    events = [Transcribe(language="en"), *clip(server, TEXT, stereo=True)]
    first, *chunks, transcript, _ = ask(server, events, "transcript-stop")
    assert first.type == "transcript-start"
    assert {chunk.type for chunk in chunks} == {"transcript-chunk"}
    assert len(chunks) > 1
    assert "".join(chunk.data["text"] for chunk in chunks) == TEXT
    assert transcript.data == {"text": TEXT, "language": "en"}


@pytest.mark.parametrize("size", [2047, 2050])
def test_block_may_end_within_a_sample(size: int, server: RunningServer) -> None:
    """For a live model, and a stereo clip, whose samples have four bytes."""
    samples = np.repeat(speak(server.tokenizer, TEXT), 2)
    content, form = samples.tobytes(), {"rate": RATE, "width": 2, "channels": 2}
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    chunks = [AudioChunk(audio=block, **form) for block in blocks]
    answer = ask(server, [AudioStart(**form), *chunks, AudioStop()], "transcript")
    assert answer[-1].data["text"] == TEXT


def test_ping_is_answered(server: RunningServer) -> None:
    (pong,) = ask(server, [Ping(text="a")], "pong")
    assert pong.data == {"text": "a"}


def test_client_reads_the_error_although_it_sends_more(server: RunningServer) -> None:
    """Its audio filled the buffers, and the connection was reset."""
    start = b'{"type": "audio-start", "data": {"rate": 8000, "width": 2, "channels": 1}}\n'
    bad = b'{"type": "transcribe", "data": {"name": "nobody"}}\n'
    with socket.create_connection(("127.0.0.1", server.wyoming_port or 0), 20) as stream:
        stream.sendall(bad + start + 8_000_000 * b"x")
        answer = b"".join(iter(lambda: stream.recv(10_000), b""))
    assert b"tones, second" in answer


@pytest.mark.parametrize("choice", [{"name": "second"}, {"language": "fr-FR"}])
def test_whole_clip_model_is_chosen_by_name_or_language(
    choice: dict[str, str], server: RunningServer
) -> None:
    """It is for all languages, and sends its text at the end."""
    events = [Transcribe(**choice), *clip(server, "a lazy dog")]
    assert [event.data["text"] for event in ask(server, events, "transcript")] == ["a lazy dog"]


def test_text_of_no_sound_is_empty(server: RunningServer) -> None:
    assert ask(server, [AudioStart(RATE, 2, 1), AudioStop()], "transcript")[0].data["text"] == ""


def test_voice_speaks(server: RunningServer) -> None:
    request = Synthesize(text="a lazy dog.", voice=SynthesizeVoice(name="anna"))
    *_, last = events = ask(server, [request], "audio-stop")
    assert (events[0].type, events[0].data["rate"]) == ("audio-start", FILE_RATE)
    assert last.type == "audio-stop"
    samples = np.frombuffer(b"".join(event.payload or b"" for event in events), "<i2")
    heard = server.post(wav(samples, FILE_RATE), data={"model": "second"})
    assert heard.json()["text"] == "a lazy dog"


def test_bad_and_too_many_events_get_an_error(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    long, secret = AudioChunk(RATE, 2, 1, bytes(RATE)), "777-777-777"
    for events, words in (
        ([Transcribe(name="nobody")], "tones, second"),
        ([Transcribe(name="tones", language="fr")], "`language` must be en"),
        (
            [Synthesize(text="a", voice=SynthesizeVoice(language="fr"))],
            "must be the language of a voice",
        ),
        ([Synthesize(text="")], "must have at least 1 character"),
        ([Synthesize(text=secret)], "Only letters can be spoken"),
        ([Raw("synthesize")], "synthesize lacks a field"),
        ([AudioChunk(RATE, 4, 1, bytes(8))], "`width` must be 2"),
        ([long] * 19, "more than 9 s of audio"),
    ):
        if not isinstance(events[0], Synthesize | Raw):
            start = AudioStart(RATE, 2, 1)
            events = [start, *events] if isinstance(events[0], AudioChunk) else [*events, start]
        (error,) = ask(server, events, "error")
        assert words in error.data["text"]
    for content in (
        b"[]\n",
        b"{}\n",
        b'{"type": "x", "payload_length": 99999999}\n',
        b"\xff\n",
        DEEP,
    ):
        with socket.create_connection(("127.0.0.1", server.wyoming_port or 0), 20) as stream:
            stream.sendall(content)
            assert stream.recv(10_000) == b""
    server.service.sessions += (limit := Limits().max_sessions)
    error = ask(server, [], "error")[0]
    server.service.sessions -= limit
    assert f"{limit} sessions are open" in error.data["text"]
    wait_for(lambda: server.service.sessions == 0 == server.service.in_flight)
    assert ask(server, [Transcribe(), *clip(server, "a fox")], "transcript")[-1].data["text"]
    assert not any(record.exc_info for record in caplog.records)
    assert "wyoming error 400: input" in caplog.text and secret not in caplog.text


def test_stopping_server_takes_no_new_clients(tmp_path: Path) -> None:
    def is_closed() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.wyoming_port or 0)).close()
        except ConnectionRefusedError:
            return True
        return False

    with running_server(tmp_path, speaks_wyoming=True) as server, ThreadPoolExecutor(1) as clients:
        with server.busy() as has_batch:
            queued = clients.submit(server.post, server.say("the last fox"))
            assert has_batch.wait(20)
            assert not is_closed()
            server.http_server.should_exit = True
            wait_for(is_closed)
        assert queued.result().status_code == 200


def test_port_in_use_is_refused(plain_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        with pytest.raises(SbkitError, match=f"cannot listen at 127.0.0.1, port {port}"):
            run(["serve", str(plain_bundle), "--port=0", "--wyoming", port])


def test_log_says_that_a_network_needs_no_key(
    plain_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    for address, is_told in (("127.0.0.1", False), ("0.0.0.0", True)):
        options = ["--port=0", "--wyoming=0", "--wyoming-host", address, "--device=cpu"]
        assert run(["serve", str(plain_bundle), *options]) == 0
        assert ("whoever reaches it can use the models" in capsys.readouterr().err) is is_told

"""Whatever OpenAI's client can send is used, accepted and listed, or refused with a reason."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import openai
import pytest
from openai.types.audio import speech_create_params, transcription_create_params
from openai.types.beta.realtime import transcription_session_update_param
from openai.types.realtime import realtime_transcription_session_create_request_param
from typing_extensions import is_typeddict

from sbkit.serve.api import BetaSession, Fields
from tests.runtime.tones import streaming_bundle
from tests.serve.server import RunningServer, ToneSpeaker, running_server, silence

PAGE = Path(__file__).parents[2] / "docs/guide/serve-api.md"
VALUES: dict[Any, Any] = {bool: True, int: 1000, float: 0.5, NoneType: None}
TEXTS = {"voice": "alloy", "id": "alloy", "model": "whisper-1-2026"}  # otherwise "en"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("official")
    tones = streaming_bundle(folder)
    with running_server(folder, tones=tones, language="en", speaker=ToneSpeaker) as server:
        yield server


def values(hint: Any, name: str = "") -> list[Any]:
    """Return values of a type: all of a literal, and an object for each value of its fields."""
    if is_typeddict(hint):
        return [{key: value} for key, value in fields(hint)]
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    inner = [value for part in get_args(hint) for value in values(part, name)]
    if get_origin(hint) in (list, Sequence):
        return [[value] for value in inner]
    return inner or [VALUES.get(hint, TEXTS.get(name, "en"))]


def fields(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind).items()
    return [(name, value) for name, hint in hints for value in values(hint, name)]


def test_requests_with_each_official_field_are_answered(server: RunningServer) -> None:
    audio, clip = server.openai.audio, ("a.wav", silence(0.2))
    for name, value in fields(transcription_create_params.TranscriptionCreateParamsBase):
        request = {"model": "whisper-1", name: value, "file": clip}
        if value != "diarized_json":
            audio.transcriptions.create(**request)
            continue
        with pytest.raises(openai.BadRequestError, match="must be 'json', 'text', 'srt'"):
            audio.transcriptions.create(**request)
    for name, value in fields(speech_create_params.SpeechCreateParams):
        if value != TEXTS["model"]:
            request = {"model": "tts-1", "voice": "alloy", name: value, "input": "a"}
            audio.speech.create(**request)


def test_session_updates_with_each_official_field_are_applied(server: RunningServer) -> None:
    module = realtime_transcription_session_create_request_param
    kinds = {
        "session": module.RealtimeTranscriptionSessionCreateRequestParam,
        "transcription_session": transcription_session_update_param.Session,
    }
    with server.openai.realtime.connect() as session:
        session.recv()
        for event, kind in kinds.items():
            for name, value in fields(kind):
                update = {"type": f"{event}.update", "session": {name: value}}
                session._connection.send(json.dumps(update))
                assert session.recv().type == f"{event}.updated", update


def test_fields_without_an_effect_are_logged_once_and_on_the_page(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.base.messages._noted", set())
    for _ in range(2):
        server.post(silence(0.2), data={"temperature": "0"})
    assert caplog.text.count("`temperature`, which a client sends, has no effect") == 1
    names = {
        name for kind in (*Fields.__subclasses__(), BetaSession) for name in kind.without_effect
    }
    assert [name for name in names if f"`{name}`" not in PAGE.read_text("utf-8")] == []

"""What OpenAI's client can send is used, or accepted and listed."""

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai.types.audio import speech_create_params, transcription_create_params
from openai.types.realtime import (
    realtime_transcription_session_create_request_param as session_create_request_param,
)
from typing_extensions import is_typeddict

from sbkit.serve.api import Fields, SpeechFields, TranscriptionFields
from tests.serve.server import RunningServer, silence

PAGE = Path(__file__).parents[2] / "docs/guide/serve-api.md"
SESSION = session_create_request_param.RealtimeTranscriptionSessionCreateRequestParam
REFUSED = ({"model": "en"}, {"response_format": "diarized_json"})
VALUES: dict[Any, Any] = {bool: True, int: 1000, float: 0.5, NoneType: None}  # and any text: "en"


def values(hint: Any) -> list[Any]:
    """Return values of a type: all of a literal, and an object for each value of its fields."""
    if is_typeddict(hint):
        hints = get_type_hints(hint).items()
        fields = [{name: value} for name, part in hints for value in values(part)]
        return [field for field in fields if field not in REFUSED]
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    inner = [value for part in get_args(hint) for value in values(part)]
    if get_origin(hint) in (list, Sequence):
        return [[value] for value in inner]
    return inner or [VALUES.get(hint, "en")]


def test_server_accepts_each_official_field(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.base.messages.logged_notes", set())
    with server.openai.realtime.connect() as session:
        for field in values(transcription_create_params.TranscriptionCreateParamsBase):
            request = {"model": "whisper-1", **field, "file": ("a.wav", silence(0.2))}
            server.openai.audio.transcriptions.create(**request)
        session.recv()
        for field in values(SESSION):
            session.session.update(session=field)
            assert session.recv().type == "session.updated", field
    assert caplog.text.count("`chunking_strategy`, which a client sends, has no effect") == 1
    speech = {*get_type_hints(speech_create_params.SpeechCreateParams)}
    assert speech <= {*SpeechFields.model_fields, *SpeechFields.without_effect}


def test_page_lists_all_fields_without_effect() -> None:
    page = PAGE.read_text("utf-8")
    for kind in (*Fields.__subclasses__(), TranscriptionFields):
        assert [name for name in kind.without_effect if f"`{name}`" not in page] == []

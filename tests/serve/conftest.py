"""The server that most modules here share."""

from collections.abc import Iterator

import pytest

from tests.runtime.tones import streaming_bundle
from tests.serve.server import RunningServer, ToneSpeaker, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve a streaming model and a voice without limits of their own."""
    folder = tmp_path_factory.mktemp("served")
    tones = streaming_bundle(folder)
    with running_server(folder, tones=tones, speaker=ToneSpeaker, language="en") as server:
        yield server

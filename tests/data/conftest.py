"""What tests of prepared data share."""

from pathlib import Path

import pytest

from sbkit.data import clips
from tests.calls import note_calls


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the clips that are decoded for the cache or for shards."""
    return note_calls(monkeypatch, clips, "read_audio", lambda path, *_: Path(path).stem)

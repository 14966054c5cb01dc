"""What tests of prepared data share."""

from pathlib import Path
from typing import Any

import pytest

from sbkit.audio.io import read_audio
from sbkit.data import clips


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the clips that are decoded for the cache or for shards."""
    names: list[str] = []

    def record(path: str, *arguments: Any) -> Any:
        names.append(Path(path).stem)
        return read_audio(path, *arguments)

    monkeypatch.setattr(clips, "read_audio", record)
    return names

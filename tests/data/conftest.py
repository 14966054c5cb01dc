"""What tests of prepared data share."""

from pathlib import Path

import pytest

from sbkit.data import clip_decoding
from tests.calls import note_calls


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the clips that are decoded for the cache or for shards."""
    return note_calls(monkeypatch, clip_decoding, "read_audio", lambda path, *_: Path(path).stem)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own: clips with the same content are decoded once."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

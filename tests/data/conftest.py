"""Fixtures that tests of prepared data share."""

from pathlib import Path

import pytest

from sbkit.data import clip_decoding
from tests.calls import note_calls


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the audio files that this process opens to decode them."""
    return note_calls(monkeypatch, clip_decoding, "_open", lambda path, *_: path)


@pytest.fixture(autouse=True)
def _always_own_cache(own_cache: Path) -> None:
    """Give each test a cache of its own: clips with the same content are decoded once."""

"""Notes on the calls of a function."""

from collections.abc import Callable
from typing import Any

import pytest


def note_calls(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., Any]
) -> list[Any]:
    """Return a list of what ``note`` makes of the positional arguments of each later call."""
    notes: list[Any] = []
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        notes.append(note(*arguments))
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return notes

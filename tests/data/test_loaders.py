"""Workers need shared memory: one whose batch has no room there is waited for."""

import shutil
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.batch import make_loaders

KNOBS = {
    "num_workers": 2,
    "batch_seconds": 100.0,
    "grad_accumulation_factor": 1,
    "eval_batch_seconds": 10.0,
    "sample_rate": 16_000,
}
NEEDED = 2 * 2 * 100 * 16_000 * 2  # batches of each, workers, seconds, samples, bytes


def test_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 8 * NEEDED - 1})()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    nothing: Any = None
    with pytest.raises(SbkitError, match=r"need 102 MB of shared memory"):
        make_loaders(nothing, KNOBS, collate=nothing, placement=nothing)
    with pytest.raises(AttributeError):  # it continues to the splits, of which there are none
        make_loaders(nothing, {**KNOBS, "num_workers": 1}, collate=nothing, placement=nothing)

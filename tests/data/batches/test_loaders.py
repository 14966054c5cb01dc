"""Workers need shared memory: one whose batch has no room there is waited for."""

import shutil
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.batches.loaders import make_loaders

KNOBS = {
    "num_workers": 2,
    "batch_seconds": 100.0,
    "grad_accumulation_factor": 1,
    "eval_batch_seconds": 10.0,
    "sample_rate": 16_000,
}
NEEDED = 2 * 2 * 100 * 16_000 * 2  # batches of each, workers, seconds, samples, bytes


def load(knobs: dict[str, Any]) -> None:
    nothing: Any = None
    make_loaders(nothing, knobs, collate=nothing, placement=nothing)


@pytest.mark.parametrize(("local", "needed"), [("1", "13 MB"), ("8", "102 MB")])
def test_too_little_room_is_refused(
    local: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = NEEDED * int(local) - 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": free})())
    with pytest.raises(SbkitError, match=rf"\({needed} in all\), but /dev/shm has"):
        load(KNOBS)
    with pytest.raises(AttributeError):  # it goes on to the splits, of which there are none
        load({**KNOBS, "batch_seconds": 99.0})
    with pytest.raises(AttributeError):
        load({**KNOBS, "num_workers": 0})

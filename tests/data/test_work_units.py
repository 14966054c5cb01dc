"""Units are written in several processes as in one."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sbkit.audio.io import BEYOND_END, AudioSpan
from sbkit.base.errors import DataError
from sbkit.data import work_units
from sbkit.data.filesystem import Storage
from sbkit.data.shard import read_shard_tables
from sbkit.data.work_units import Unit, WorkUnit, list_shards, write_units
from tests.data.test_splits import make_clips
from tests.processes import Process
from tests.shortage import NO_PROCESS, refusing


def units_of(spans: Sequence[AudioSpan], out: Path, store: str) -> list[Unit]:
    """Return units of three clips."""
    work = (spans[first : first + 3] for first in range(0, len(spans), 3))
    return [WorkUnit("train", 16_000, store, clips).to_unit(str(out)) for clips in work]


def read(out: Path) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    storage = Storage(out)
    names = [name for shards in list_shards(storage).values() for name in shards]
    tables = read_shard_tables(storage, names)
    return [(table.stored.to_pylist(), table.left_out.to_pylist()) for table in tables]


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_processes_decode_what_one_decodes(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [AudioSpan(str(clip.path)) for clip in make_clips(tmp_path / "clips", 6)]
    first = spans[0].path  # lasts 0.1 s
    spans += [AudioSpan(first, start, start + 50_000) for start in (0, 50_000, 200_000)]
    spans += [AudioSpan(first, channel=3), AudioSpan(str(tmp_path / "missing.wav"))]
    monkeypatch.setattr(work_units, "usable_cores", lambda: 2)
    for name, min_clips in (("one", 500), ("several", 2)):
        monkeypatch.setattr(work_units, "MIN_CLIPS_FOR_PROCESSES", min_clips)
        write_units(units_of(spans, tmp_path / name, store), "decoding")
    tables = read(tmp_path / "one")
    assert tables == read(tmp_path / "several")
    assert sum(len(rows) for rows, _ in tables) == 8
    reasons = sorted(row["audio"]["reason"] for _, left_out in tables for row in left_out)
    assert reasons == [BEYOND_END, "unreadable audio"]  # what is missing may come


def test_killed_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "usable_cores", lambda: 2)
    monkeypatch.setattr(work_units, "MIN_CLIPS_FOR_PROCESSES", 2)
    # By value: a function of this module would make the processes import torch.
    kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(work_units, "write", kill)
    with pytest.raises(DataError, match="One of the 2 processes .* was killed"):
        write_units(units_of([AudioSpan("a.wav")] * 6, tmp_path, "pcm"), "decoding")


def test_audio_is_decoded_without_processes_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work_units, "usable_cores", lambda: 2)
    monkeypatch.setattr(work_units, "MIN_CLIPS_FOR_PROCESSES", 2)
    spans = [AudioSpan(str(clip.path)) for clip in make_clips(tmp_path / "clips", 6)]
    with refusing("loky.get_reusable_executor", NO_PROCESS):
        write_units(units_of(spans, tmp_path / "corpus", "pcm"), "decoding")
    assert sum(len(rows) for rows, _ in read(tmp_path / "corpus")) == 6
    assert caplog.text.count("decoding audio without other processes") == 1


DECODE_FOREVER = """
import sys
from sbkit.audio.io import AudioSpan
from sbkit.data import work_units
work_units.usable_cores = lambda: 2
clips = [AudioSpan(sys.argv[1])] * 1_000_000
work = work_units.WorkUnit("train", 16_000, "pcm", clips)
work_units.write_units([work.to_unit(f"{sys.argv[2]}/{name}") for name in "ab"], "decoding")
"""


def test_processes_end_with_a_killed_one(tmp_path: Path) -> None:
    (clip,) = make_clips(tmp_path, 1)
    process = Process(["-c", DECODE_FOREVER, clip.path, tmp_path])
    workers: list[Path] = []
    deadline = time.monotonic() + 60
    while len(workers) < 3 and time.monotonic() < deadline:  # the third is loky's own
        time.sleep(0.05)
        lists = Path(f"/proc/{process.pid}/task").glob("*/children")
        workers = [Path("/proc", pid) for file in lists for pid in file.read_text().split()]
    process.kill()
    process.wait()
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.exists() for worker in workers)

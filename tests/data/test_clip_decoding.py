"""Clips are decoded in several processes as in one."""

import os
import signal
import time
from pathlib import Path

import pytest

from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioPart
from sbkit.base.errors import DataError
from sbkit.data import clip_decoding
from sbkit.data.clip_decoding import DecodedClip, decode_clips
from tests.data.test_splits import make_clips
from tests.processes import Process


def decode(parts: list[AudioPart], store: str) -> list[DecodedClip | tuple[str, str]]:
    return [
        (clip.audio.reason, str(clip.audio)) if isinstance(clip.audio, AudioError) else clip
        for clip in decode_clips(parts, 16_000, store=store)
    ]


@pytest.mark.parametrize("store", ["pcm", "flac"])
def test_processes_decode_what_one_decodes(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [AudioPart(str(clip.path)) for clip in make_clips(tmp_path, 6)]
    first = parts[0].path  # lasts 0.1 s
    parts[2:2] = [AudioPart(first, start, start + 50_000) for start in (0, 50_000, 200_000)]
    parts += [AudioPart(first, channel=3), AudioPart(str(tmp_path / "missing.wav"))]
    monkeypatch.setattr(clip_decoding, "usable_cores", lambda: 2)
    expected = decode(parts, store)
    monkeypatch.setattr(clip_decoding, "MIN_CLIPS_FOR_PROCESSES", 2)
    assert decode(parts, store) == expected
    assert sum(isinstance(clip, DecodedClip) for clip in expected) == 8


def test_killed_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_decoding, "usable_cores", lambda: 2)
    monkeypatch.setattr(clip_decoding, "MIN_CLIPS_FOR_PROCESSES", 2)
    # By value: a function of this module would make the processes import torch.
    kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(clip_decoding, "_decode_clip", kill)
    with pytest.raises(DataError, match="One of the 2 processes .* was killed, perhaps because"):
        decode([AudioPart("a.wav"), AudioPart("b.wav")], "pcm")


DECODE_FOREVER = """
import sys
from sbkit.audio.io import AudioPart
from sbkit.data import clip_decoding
clip_decoding.usable_cores = lambda: 2
for _ in clip_decoding.decode_clips([AudioPart(sys.argv[1])] * 1_000_000, 16_000):
    pass
"""


def test_processes_end_with_a_killed_one(tmp_path: Path) -> None:
    (clip,) = make_clips(tmp_path, 1)
    process = Process(["-c", DECODE_FOREVER, clip.path])
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

"""Players: a file, and PortAudio with a device that the test moves."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from tools.talk.players import FilePlayer, Speakers

RATE, LATENCY = 8_000, 0.25  # LATENCY: seconds until a sample that the device took is heard


class Stream:
    """An output stream of PortAudio; `move` lets it play a number of samples."""

    latency = LATENCY

    def __init__(self, *, samplerate: int, callback: Any, channels: int, dtype: str) -> None:
        assert (channels, dtype) == (1, "int16")
        self.samplerate, self.time, self.calls = samplerate, 10.0, list[str]()
        self._callback = callback

    def move(self, samples: int) -> list[int]:
        out = bytearray(2 * samples)
        self._callback(memoryview(out), samples, None, None)
        self.time += samples / self.samplerate
        return list(np.frombuffer(out, np.int16))

    def start(self) -> None:
        self.calls.append("start")

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    streams = list[Stream]()

    def open_stream(**options: Any) -> Stream:
        streams.append(Stream(**options))
        return streams[-1]

    monkeypatch.setitem(sys.modules, "sounddevice", SimpleNamespace(RawOutputStream=open_stream))
    return streams


def test_speakers_wait_by_their_clock(
    streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(threading.Condition):
        """Wait by moving the clock of the device."""

        def wait(self, timeout: float | None = None) -> bool:
            streams[0].time += timeout or 0.0
            assert streams[0].time < 20
            return True

    monkeypatch.setattr(threading, "Condition", Clock)
    speakers = Speakers(RATE)
    (stream,) = streams
    speakers.wait(0.0)  # nothing is left
    speakers.play(np.arange(1, 3001, dtype=np.int16))
    speakers.play(np.arange(3001, 4001, dtype=np.int16))
    speakers.wait(0.5 + LATENCY)
    assert stream.time == 10.0
    speakers.wait(0.1)
    assert stream.time == pytest.approx(10.0 + LATENCY + 0.5 - 0.1)
    assert [*stream.move(2500), *stream.move(2500)] == [*range(1, 4001), *[0] * 1000]
    late = stream.time
    speakers.play(np.ones(800, np.int16))
    speakers.wait(0.0)
    assert stream.time == pytest.approx(late + LATENCY + 0.1)


def test_speakers_drop_pending_sound(streams: list[Stream]) -> None:
    speakers = Speakers(RATE)
    speakers.play(np.ones(4000, np.int16))
    (stream,) = streams
    stream.move(100)
    speakers.stop()
    speakers.wait(0.0)
    assert not any(stream.move(100))
    speakers.close()
    assert stream.calls == ["start", "abort", "start", "close"]


def test_file_player_writes_all_blocks(tmp_path: Path) -> None:
    player = FilePlayer(tmp_path / "answer.wav", RATE)
    for block in (np.arange(5, dtype=np.int16), np.arange(3, dtype=np.int16)):
        player.play(block)
        player.wait(0.0)
    player.stop()
    player.close()
    samples, rate = soundfile.read(tmp_path / "answer.wav", dtype="int16")
    assert (samples.tolist(), rate) == ([0, 1, 2, 3, 4, 0, 1, 2], RATE)

"""Players of speech: an audio file, and a loudspeaker through PortAudio."""

import threading
from pathlib import Path
from typing import Any, Protocol

import soundfile

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.streaming.sources import require_sounddevice


class Player(Protocol):
    """Plays blocks one after the other, and knows when they have been heard."""

    def play(self, samples: Samples) -> object:
        """Play a block (S,) of int16 after all earlier blocks."""

    def wait(self, seconds: float) -> object:
        """Return once at most this much sound is left to play, or once `stop` is called."""

    def stop(self) -> object:
        """Drop all sound that has not been heard."""

    def close(self) -> object:
        """Release the file or the device; may be called again."""


class FilePlayer:
    """Write an audio file; a block counts as heard when it is written."""

    def __init__(self, path: Path | str, sample_rate: int) -> None:
        self._file = soundfile.SoundFile(path, "w", sample_rate, 1, "PCM_16")

    def play(self, samples: Samples) -> None:
        self._file.write(samples)

    def wait(self, seconds: float) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class Speakers:
    """Play through PortAudio, and use its clock."""

    def __init__(self, sample_rate: int) -> None:
        """Open the device; raises DeviceError without PortAudio."""
        self._changed = threading.Condition()
        self._pending, self._end = b"", 0.0  # bytes for the device; the time when all is heard
        self._stream = require_sounddevice().RawOutputStream(
            samplerate=sample_rate, channels=1, dtype="int16", callback=self._fill
        )
        self._stream.start()

    def play(self, samples: Samples) -> None:
        with self._changed:
            begin = max(self._end, self._stream.time + self._stream.latency)
            self._pending += samples.tobytes()
            self._end = begin + samples_to_seconds(len(samples), self._stream.samplerate)

    def wait(self, seconds: float) -> None:
        with self._changed:
            while self._end and (excess := self._end - self._stream.time - seconds) > 0:
                self._changed.wait(excess)

    def stop(self) -> None:
        """Drop all sound that has not been heard, also in the device."""
        with self._changed:
            self._pending, self._end = b"", 0.0
            self._changed.notify_all()
        self._stream.abort()
        self._stream.start()

    def close(self) -> None:
        self._stream.close()

    def _fill(self, out: Any, *_: object) -> None:
        with self._changed:
            block, self._pending = self._pending[: len(out)], self._pending[len(out) :]
        out[:] = block.ljust(len(out), b"\0")

"""What plays the sound of a pipeline: a loudspeaker, or a file."""

import threading
from pathlib import Path
from typing import Any, Protocol

import soundfile

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.live.sources import require_sounddevice


class Player(Protocol):
    """What plays blocks one after the other, and knows by its clock when they have been heard."""

    def play(self, samples: Samples) -> object:
        """Take a block (S,) of int16; it is heard after those before."""

    def wait(self, seconds: float) -> object:
        """Return when no more than so much is left to be heard, or `stop` is called."""

    def stop(self) -> object:
        """Drop all that has not been heard."""

    def close(self) -> object:
        """Release the file or the device; it may be called again."""


class FilePlayer:
    """Write what is played to an audio file, where it counts as heard."""

    def __init__(self, path: Path | str, sample_rate: int) -> None:
        """Create the file."""
        self._file = soundfile.SoundFile(path, "w", sample_rate, 1, "PCM_16")

    def play(self, samples: Samples) -> None:
        """Write a block (S,) of int16."""
        self._file.write(samples)

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def stop(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Speakers:
    """Play with PortAudio, by its clock."""

    def __init__(self, sample_rate: int) -> None:
        """Open the device; raise SbkitError where PortAudio is not there."""
        self._changed = threading.Condition()
        self._left, self._end = b"", 0.0  # bytes for the device; when all is heard, in its seconds
        self._stream = require_sounddevice().RawOutputStream(
            samplerate=sample_rate, channels=1, dtype="int16", callback=self._fill
        )
        self._stream.start()

    def play(self, samples: Samples) -> None:
        """Take a block (S,) of int16."""
        with self._changed:
            begin = max(self._end, self._stream.time + self._stream.latency)
            self._left += samples.tobytes()
            self._end = begin + samples_to_seconds(len(samples), self._stream.samplerate)

    def wait(self, seconds: float) -> None:
        """Return when no more than so much is left to be heard, or `stop` is called."""
        with self._changed:
            while self._end and (more := self._end - self._stream.time - seconds) > 0:
                self._changed.wait(more)

    def stop(self) -> None:
        """Drop all that has not been heard, also what the device has taken."""
        with self._changed:
            self._left, self._end = b"", 0.0
            self._changed.notify_all()
        self._stream.abort()
        self._stream.start()

    def close(self) -> None:
        """Release the device."""
        self._stream.close()

    def _fill(self, out: Any, *_: object) -> None:
        with self._changed:
            taken, self._left = self._left[: len(out)], self._left[len(out) :]
        out[:] = taken.ljust(len(out), b"\0")

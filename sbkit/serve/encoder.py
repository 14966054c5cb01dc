"""Files of speech, written as it is made: what was returned is not changed any more."""

import io
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soundfile

from sbkit.audio.resample import END, Resampler

RATE = 24_000  # samples a second: of pcm in OpenAI's API, and one that opus has
ENDLESS = 0xFFFFFFFF  # bytes that a header declares, where they are not known yet
Signal = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """A format of files: its media type, and what libsndfile calls it.

    level: of compression, of a constant bit rate; skipped: bytes at the beginning that say how
    long it is, before that is known.
    """

    media_type: str
    container: str
    subtype: str
    level: float | None = None
    skipped: int = 0


FORMATS = {  # mp3: 80 kbit/s, so that a player knows the duration without its first frame
    "mp3": Format("audio/mpeg", "MP3", "MPEG_LAYER_III", 0.5, 72 * 80_000 // RATE),
    "opus": Format("audio/ogg", "OGG", "OPUS"),
    "flac": Format("audio/flac", "FLAC", "PCM_16"),
    "wav": Format("audio/wav", "RAW", "PCM_16"),
    "pcm": Format("audio/pcm", "RAW", "PCM_16"),
}


class Encoder:
    """Write a file of 24 kHz, mono, bit by bit."""

    def __init__(self, format: str, sample_rate: int) -> None:
        """Begin one of FORMATS; sample_rate: of what is pushed; close its `file` in any case."""
        kind = FORMATS[format]
        self._content, self._sent = io.BytesIO(), kind.skipped
        if format == "wav":
            self._content.write(wav_header())
        endian = "LITTLE" if kind.container == "RAW" else "FILE"  # which is the container's
        steady = {"compression_level": kind.level, "bitrate_mode": "CONSTANT"} if kind.level else {}
        self.file = soundfile.SoundFile(
            self._content, "w", RATE, 1, kind.subtype, endian, kind.container, **steady
        )
        self._resampler = Resampler(sample_rate, RATE)
        self._samples = 0

    @property
    def seconds(self) -> float:
        """The duration of what was written."""
        return self._samples / RATE

    def push(self, signal: Signal, *, is_last: bool = False) -> bytes:
        """Write samples (S,) between -1 and 1, and return the bytes that this adds."""
        samples = self._resampler.push(signal, is_last=is_last)
        self._samples += len(samples)
        self.file.write(np.clip(samples, -1, 1))
        return self._new_bytes()

    def finish(self) -> bytes:
        """Return the rest; what libsndfile would write at the beginning stays as it is."""
        added = self.push(END, is_last=True)
        self.file.close()
        return added + self._new_bytes()

    def _new_bytes(self) -> bytes:
        added = bytes(self._content.getbuffer()[self._sent :])
        self._sent += len(added)
        return added


def wav_header() -> bytes:
    """Write the header of a WAV that has no end yet: 16 bits, mono."""
    kind = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    sizes = struct.pack("<I", ENDLESS)
    return b"RIFF" + sizes + b"WAVEfmt " + struct.pack("<I", len(kind)) + kind + b"data" + sizes

"""A TTS model that speaks for many clients, and the audio files that carry its speech.

A file is written while the speech is synthesized: bytes that were returned never change.
"""

import io
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile

from sbkit.audio.resample import END, Resampler, Signal
from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import SpeechSynthesizer
from sbkit.serve.middleware import Metrics
from sbkit.serve.recognizer import Workers

MAX_SPEECH_SECONDS = 360  # of a request: 4,096 characters of plain words take 315
WARM_UP_TEXT = "1, 2, 3."  # which any language can say
FILE_RATE = 24_000  # samples a second: of pcm in OpenAI's API, and one that opus has
UNKNOWN_BYTES = 0xFFFFFFFF  # that a header declares while the length is not known

SpeechParts = AsyncGenerator[Any]  # notes, the bytes of a file as they are made, then its seconds


@dataclass(frozen=True)
class FileFormat:
    """A format of files, by its media type, and its names in libsndfile."""

    media_type: str
    container: str
    subtype: str
    level: float | None = None  # of compression, with a constant bit rate
    skipped: int = 0  # bytes at the beginning that declare the length, which is not known yet


FILE_FORMATS = {  # mp3: 80 kbit/s, so that a player knows the duration without its first frame
    "mp3": FileFormat("audio/mpeg", "MP3", "MPEG_LAYER_III", 0.5, 72 * 80_000 // FILE_RATE),
    "opus": FileFormat("audio/ogg", "OGG", "OPUS"),
    "flac": FileFormat("audio/flac", "FLAC", "PCM_16"),
    "wav": FileFormat("audio/wav", "RAW", "PCM_16"),
    "pcm": FileFormat("audio/pcm", "RAW", "PCM_16"),
}


class FileWriter:
    """Write a file of 24 kHz, mono, bit by bit; close its ``file`` in any case.

    format: one of FILE_FORMATS.
    sample_rate: of the samples that are pushed.
    """

    def __init__(self, format: str, sample_rate: int) -> None:
        kind = FILE_FORMATS[format]
        self._content, self._sent = io.BytesIO(), kind.skipped
        if format == "wav":
            self._content.write(_wav_header())
        endian = "LITTLE" if kind.container == "RAW" else "FILE"  # the container's own
        steady = {"compression_level": kind.level, "bitrate_mode": "CONSTANT"} if kind.level else {}
        self.file = soundfile.SoundFile(
            self._content, "w", FILE_RATE, 1, kind.subtype, endian, kind.container, **steady
        )
        self._resampler = Resampler(sample_rate, FILE_RATE)
        self._samples = 0

    @property
    def seconds(self) -> float:
        """The duration of the file so far."""
        return self._samples / FILE_RATE

    def push(self, signal: Signal, *, is_last: bool = False) -> bytes:
        """Write samples (S,) between -1 and 1, and return the bytes that this adds."""
        samples = self._resampler.push(signal, is_last=is_last)
        self._samples += len(samples)
        self.file.write(np.clip(samples, -1, 1))
        return self._new_bytes()

    def finish(self) -> bytes:
        """Return the last bytes; those that libsndfile changes at the beginning stay as sent."""
        added = self.push(END, is_last=True)
        self.file.close()
        return added + self._new_bytes()

    def _new_bytes(self) -> bytes:
        added = bytes(self._content.getbuffer()[self._sent :])
        self._sent += len(added)
        return added


def _wav_header() -> bytes:
    """Write the header of a WAV without an end: 16 bits, mono."""
    format = struct.pack("<HHIIHH", 1, 1, FILE_RATE, 2 * FILE_RATE, 2, 16)
    size = struct.pack("<I", UNKNOWN_BYTES)
    return b"RIFF" + size + b"WAVEfmt " + struct.pack("<I", len(format)) + format + b"data" + size


class Voice:
    """Speak the texts of many clients at a time, sentence by sentence."""

    def __init__(
        self, synthesizer: SpeechSynthesizer, *, workers: Workers, metrics: Metrics
    ) -> None:
        self.effective, self.sample_rate = synthesizer.effective, synthesizer.sample_rate
        self._synthesizer, self._workers, self._metrics = synthesizer, workers, metrics

    def warm_up(self) -> None:
        with suppress(SbkitError):
            speech = self._synthesizer.stream(WARM_UP_TEXT, max_seconds=MAX_SPEECH_SECONDS)
            deque(speech.audio, maxlen=0)

    def speak(self, text: str, speed: float, format: str) -> SpeechParts:
        """Speak a text in one of FILE_FORMATS; raises SbkitError if it cannot be spoken."""

        def work(give: Callable[[Sequence[str] | bytes], None]) -> float:
            writer = FileWriter(format, self.sample_rate)
            speech = self._synthesizer.stream(text, speed, max_seconds=MAX_SPEECH_SECONDS)
            give(speech.notes)
            with writer.file:  # left open, it fails when the program ends
                for block in speech.audio:
                    self._metrics.speech.inc(len(block) / self.sample_rate)
                    give(writer.push(block))
                give(writer.finish())
                return writer.seconds

        return self._workers.results(work)

    def close(self) -> None:
        self._synthesizer.close()

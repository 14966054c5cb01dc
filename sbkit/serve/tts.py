"""A TTS model that speaks for many clients, and the audio files of its speech.

A file is sent while the speech is synthesized, so bytes that were returned never change.
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
WARM_UP_TEXT = "1, 2, 3."  # works in any language
FILE_RATE = 24_000  # samples per second: pcm in OpenAI's API has this rate, and opus supports it
UNKNOWN_BYTES = 0xFFFFFFFF  # the size in a header if the length is not known yet

SpeechParts = AsyncGenerator[Any]  # notes, parts of a file (bytes), then its seconds (float)


@dataclass(frozen=True)
class FileFormat:
    """A file format: its media type, and its names in libsndfile."""

    media_type: str
    container: str
    subtype: str
    level: float | None = None  # of compression, with a constant bit rate
    skipped: int = 0  # leading bytes, which declare the length before it is known


FILE_FORMATS = {  # mp3 has 80 kbit/s, so players know the duration without the first frame
    "mp3": FileFormat("audio/mpeg", "MP3", "MPEG_LAYER_III", 0.5, 72 * 80_000 // FILE_RATE),
    "opus": FileFormat("audio/ogg", "OGG", "OPUS"),
    "flac": FileFormat("audio/flac", "FLAC", "PCM_16"),
    "wav": FileFormat("audio/wav", "RAW", "PCM_16"),
    "pcm": FileFormat("audio/pcm", "RAW", "PCM_16"),
}


class FileWriter:
    """Write a mono file at 24 kHz part by part; the caller closes ``file`` in any case.

    format: a name of FILE_FORMATS.
    sample_rate: of the pushed samples.
    """

    def __init__(self, format: str, sample_rate: int) -> None:
        names = FILE_FORMATS[format]
        self._content = io.BytesIO()
        self._sent = names.skipped
        if format == "wav":
            self._content.write(_wav_header())
        endian = "LITTLE" if names.container == "RAW" else "FILE"  # the container's default
        constant = {"compression_level": names.level, "bitrate_mode": "CONSTANT"}
        self.file = soundfile.SoundFile(
            *(self._content, "w", FILE_RATE, 1, names.subtype, endian, names.container),
            **(constant if names.level else {}),
        )
        self._resampler = Resampler(sample_rate, FILE_RATE)
        self._samples = 0

    @property
    def seconds(self) -> float:
        """The duration of the file so far."""
        return self._samples / FILE_RATE

    def push(self, signal: Signal, *, is_last: bool = False) -> bytes:
        """Write samples (S,) between -1 and 1, and return the new bytes of the file."""
        samples = self._resampler.push(signal, is_last=is_last)
        self._samples += len(samples)
        self.file.write(np.clip(samples, -1, 1))
        return self._new_bytes()

    def finish(self) -> bytes:
        """Return the last bytes; changes of libsndfile to earlier bytes are not sent."""
        last = self.push(END, is_last=True)
        self.file.close()
        return last + self._new_bytes()

    def _new_bytes(self) -> bytes:
        content = bytes(self._content.getbuffer()[self._sent :])
        self._sent += len(content)
        return content


def _wav_header() -> bytes:
    """Return the header of a WAV of unknown length: 16 bits, mono."""
    format = struct.pack("<HHIIHH", 1, 1, FILE_RATE, 2 * FILE_RATE, 2, 16)
    size = struct.pack("<I", UNKNOWN_BYTES)
    return b"RIFF" + size + b"WAVEfmt " + struct.pack("<I", len(format)) + format + b"data" + size


class Voice:
    """Speak texts of many clients at the same time, sentence by sentence."""

    def __init__(
        self, synthesizer: SpeechSynthesizer, *, workers: Workers, metrics: Metrics
    ) -> None:
        self.effective, self.sample_rate = synthesizer.effective, synthesizer.sample_rate
        self.language = synthesizer.language
        self._synthesizer = synthesizer
        self._workers = workers
        self._metrics = metrics

    def warm_up(self) -> None:
        with suppress(SbkitError):
            speech = self._synthesizer.stream(WARM_UP_TEXT, max_seconds=MAX_SPEECH_SECONDS)
            deque(speech.audio, maxlen=0)

    def speak(self, text: str, speed: float, format: str) -> SpeechParts:
        """Speak a text in one of FILE_FORMATS; raises SbkitError if it cannot be spoken."""

        def work(send: Callable[[Sequence[str] | bytes], None]) -> float:
            writer = FileWriter(format, self.sample_rate)
            speech = self._synthesizer.stream(text, speed, max_seconds=MAX_SPEECH_SECONDS)
            send(speech.notes)
            with writer.file:  # a file left open raises when the program ends
                for block in speech.audio:
                    self._metrics.speech.inc(len(block) / self.sample_rate)
                    send(writer.push(block))
                send(writer.finish())
                return writer.seconds

        return self._workers.results(work)

    def close(self) -> None:
        self._synthesizer.close()

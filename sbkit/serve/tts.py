"""A TTS model that speaks for many clients, and the audio files of its speech.

A file is sent while the speech is synthesized, so bytes that were returned never change.
"""

import io
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.audio.decode import Signal
from sbkit.audio.io import END, Resampler
from sbkit.base.errors import SbkitError
from sbkit.serve.middleware import Metrics
from sbkit.serve.recognition import Workers

if TYPE_CHECKING:
    from sbkit.tasks.synthesis.predict import Synthesizer

MAX_SPEECH_SECONDS = 360  # of a request: 4,096 characters of plain words take 315
WARM_UP_TEXT = "1, 2, 3."  # works in any language
FILE_RATE = 24_000  # samples per second: pcm in OpenAI's API has this rate, and opus supports it
# Every packet is sent at once, and WAV has no further chunks.
FILE_OPTIONS = {"flush_packets": "1", "fflags": "+bitexact"}

SpeechStream = AsyncGenerator[Any]  # notes, the file in chunks of bytes, then its seconds


@dataclass(frozen=True)
class FileFormat:
    """A file format: its media type, and its names and options in FFmpeg."""

    media_type: str
    container: str
    codec: str
    bit_rate: int = 0  # 0 without losses
    options: Mapping[str, str] = field(default_factory=dict)


FILE_FORMATS = {  # mp3 has a constant bit rate, and no first frame that declares the length
    "mp3": FileFormat(
        "audio/mpeg", "mp3", "libmp3lame", 80_000, {"write_xing": "0", "id3v2_version": "0"}
    ),
    "opus": FileFormat("audio/ogg", "ogg", "libopus", 48_000),
    "aac": FileFormat("audio/aac", "adts", "aac", 64_000),
    "flac": FileFormat("audio/flac", "flac", "flac"),
    "wav": FileFormat("audio/wav", "wav", "pcm_s16le"),
    "pcm": FileFormat("audio/pcm", "s16le", "pcm_s16le"),
}


class FileWriter:
    """Write a mono file at 24 kHz part by part; the caller closes ``file`` in any case.

    format: a name of FILE_FORMATS.
    sample_rate: of the pushed samples.
    """

    def __init__(self, format: str, sample_rate: int) -> None:
        import av  # on first use: it takes 0.15 s

        names = FILE_FORMATS[format]
        self._content = io.BytesIO()
        self._sent = 0  # bytes
        self._resampler = Resampler(sample_rate, FILE_RATE)
        self.seconds = 0.0  # of the file so far
        options = {**FILE_OPTIONS, **names.options}
        self.file = av.open(self._content, "w", format=names.container, options=options)
        stream: Any = {"rate": FILE_RATE, "layout": "mono", "bit_rate": names.bit_rate}
        self._stream: Any = self.file.add_stream(names.codec, **stream)

    def push(self, signal: Signal, *, is_last: bool = False) -> bytes:
        """Write samples (S,) between -1 and 1, and return the new bytes of the file."""
        import av

        samples = np.clip(self._resampler.push(signal, is_last=is_last), -1, 1)
        self.seconds += len(samples) / FILE_RATE
        if len(samples):  # FFmpeg takes no empty frames
            frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            frame.sample_rate = FILE_RATE
            self.file.mux(self._stream.encode(frame))
        return self._new_bytes()

    def finish(self) -> bytes:
        """Return the last bytes; changes of FFmpeg to earlier bytes are not sent."""
        last = self.push(END, is_last=True)
        self.file.mux(self._stream.encode(None))
        self.file.close()
        return last + self._new_bytes()

    def _new_bytes(self) -> bytes:
        content = bytes(self._content.getbuffer()[self._sent :])
        self._sent += len(content)
        return content


class Voice:
    """Speak texts of many clients at the same time, sentence by sentence."""

    def __init__(self, synthesizer: "Synthesizer", *, workers: Workers, metrics: Metrics) -> None:
        self.effective, self.sample_rate = synthesizer.effective, synthesizer.sample_rate
        self.language = synthesizer.language
        self._synthesizer = synthesizer
        self._workers = workers
        self._metrics = metrics

    def warm_up(self) -> None:
        with suppress(SbkitError):
            speech = self._synthesizer.stream(WARM_UP_TEXT, max_seconds=MAX_SPEECH_SECONDS)
            deque(speech.audio, maxlen=0)

    def speak(self, text: str, speed: float, format: str) -> SpeechStream:
        """Speak a text in one of FILE_FORMATS; raises SbkitError if it cannot be spoken."""

        def work(send: Callable[[Sequence[str] | bytes], None]) -> float:
            writer = FileWriter(format, self.sample_rate)
            speech = self._synthesizer.stream(text, speed, max_seconds=MAX_SPEECH_SECONDS)
            send(speech.notes)
            with writer.file:
                for block in speech.audio:
                    self._metrics.speech.inc(len(block) / self.sample_rate)
                    send(writer.push(block))
                send(writer.finish())
                return writer.seconds

        return self._workers.run(work)

    def close(self) -> None:
        self._synthesizer.close()

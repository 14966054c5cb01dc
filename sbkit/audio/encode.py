"""Write audio files part by part, with FFmpeg's libraries.

A file may be sent while it is written, so bytes that were returned never change.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbkit.audio.decode import Signal
from sbkit.audio.io import NO_SIGNAL, Resampler

FILE_RATE = 24_000  # samples per second: pcm in OpenAI's API has this rate, and opus supports it
# Every packet is sent at once, and WAV has no further chunks.
FILE_OPTIONS = {"flush_packets": "1", "fflags": "+bitexact"}


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

        file_format = FILE_FORMATS[format]
        self._content = io.BytesIO()
        self._sent = 0  # bytes
        self._resampler = Resampler(sample_rate, FILE_RATE)
        self.seconds = 0.0  # of the file so far
        options = {**FILE_OPTIONS, **file_format.options}
        self.file = av.open(self._content, "w", format=file_format.container, options=options)
        stream: Any = {"rate": FILE_RATE, "layout": "mono", "bit_rate": file_format.bit_rate}
        self._stream: Any = self.file.add_stream(file_format.codec, **stream)

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
        last = self.push(NO_SIGNAL, is_last=True)
        self.file.mux(self._stream.encode(None))
        self.file.close()
        return last + self._new_bytes()

    def _new_bytes(self) -> bytes:
        content = bytes(self._content.getbuffer()[self._sent :])
        self._sent += len(content)
        return content

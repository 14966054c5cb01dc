"""The formats that docs/guide/audio.md promises, and a tone written in each, in memory."""

from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
import soundfile

from sbkit.audio.io import Samples
from sbkit.base.arrays import Array, Float64s
from sbkit.base.units import SAMPLE_RATE

TONE_HERTZ = 450.0
# By container and codec, as the page lists them: FFmpeg's container and encoder, and a rate in Hz.
FFMPEG_FORMATS = {
    ("WAV", "PCM"): ("wav", "pcm_s24le", 44_100),
    ("WAV", "G.711"): ("wav", "pcm_mulaw", 8_000),
    ("WAV", "ADPCM"): ("wav", "adpcm_ms", 16_000),
    ("WAV", "MP3"): ("wav", "libmp3lame", 44_100),
    ("FLAC", "FLAC"): ("flac", "flac", 44_100),
    ("MP3", "MP3"): ("mp3", "libmp3lame", 44_100),
    ("MP3", "MP2"): ("mp2", "mp2", 44_100),
    ("Ogg", "Opus"): ("ogg", "libopus", 48_000),
    ("Ogg", "FLAC"): ("ogg", "flac", 44_100),
    ("MP4", "AAC"): ("ipod", "aac", 44_100),
    ("MP4", "ALAC"): ("ipod", "alac", 44_100),
    ("QuickTime", "AAC"): ("mov", "aac", 44_100),
    ("3GP", "AAC"): ("3gp", "aac", 44_100),
    ("WebM, Matroska", "Opus"): ("webm", "libopus", 48_000),
    ("WebM, Matroska", "FLAC"): ("matroska", "flac", 44_100),
    ("AAC (ADTS)", "AAC"): ("adts", "aac", 44_100),
    ("AIFF", "PCM"): ("aiff", "pcm_s16be", 44_100),
    ("AU", "PCM"): ("au", "pcm_s16be", 44_100),
    ("AU", "G.711"): ("au", "pcm_alaw", 8_000),
    ("CAF", "PCM"): ("caf", "pcm_s16le", 44_100),
    ("CAF", "ALAC"): ("caf", "alac", 44_100),
    ("W64, RF64", "PCM"): ("w64", "pcm_s16le", 44_100),
    ("AC-3", "AC-3"): ("ac3", "ac3", 48_000),
    ("AC-3", "E-AC-3"): ("eac3", "eac3", 48_000),
    ("WavPack", "WavPack"): ("wv", "wavpack", 44_100),
    ("TTA", "TTA"): ("tta", "tta", 44_100),
    ("MPEG", "MP2"): ("mpeg", "mp2", 44_100),
    ("MPEG", "AAC"): ("mpegts", "aac", 44_100),
    ("FLV", "AAC"): ("flv", "aac", 44_100),
    ("AVI", "MP3"): ("avi", "libmp3lame", 44_100),
}
SNDFILE_FORMATS = {  # libsndfile's format and subtype
    ("Ogg", "Vorbis"): ("OGG", "VORBIS"),
    ("WAV", "GSM"): ("WAV", "GSM610"),
    ("NIST SPHERE", "PCM"): ("NIST", "PCM_16"),
}
# 20 ms, which repeated are the tone in either decoder of FFmpeg: PyAV 19 has no encoder of AMR.
AMR_FRAME = bytes.fromhex("048d2f31daab95a5a5d30d0b0c")
AMR = ("AMR", "AMR")
FORMATS = (*FFMPEG_FORMATS, *SNDFILE_FORMATS, AMR)


def encode_tone(name: tuple[str, str], seconds: float = 1.0) -> bytes:
    """Return a file of a container and a codec that holds a tone."""
    if name in FFMPEG_FORMATS:
        container, codec, rate = FFMPEG_FORMATS[name]
        return encode(container, codec, tone(rate, seconds=seconds), rate)
    if name == AMR:
        return b"#!AMR\n" + AMR_FRAME * round(50 * seconds)
    format, subtype = SNDFILE_FORMATS[name]
    soundfile.write(file := BytesIO(), tone(16_000, seconds=seconds), 16_000, subtype, None, format)
    return file.getvalue()


def tone(rate: int, hertz: float = TONE_HERTZ, seconds: float = 1.0) -> Float64s:
    """Make a sine (S,) of half amplitude."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def encode(container: str, codec: str, signal: Array, rate: int = 48_000, **options: str) -> bytes:
    """Return a signal (S,) or (C, S) as a file of FFmpeg's container and codec."""
    import av

    channels = np.atleast_2d(signal).astype(np.float32)
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    with av.open(file := BytesIO(), "w", container, options) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(channels, "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for part in (frame, None):
            output.mux(stream.encode(part))
    return file.getvalue()


def loudest_hertz(samples: Samples) -> float:
    """Return the loudest frequency of samples (S,) at 16 kHz, 0 if they are silent."""
    spectrum = np.abs(np.fft.rfft(samples.astype(np.float64)))
    return float(np.argmax(spectrum)) * SAMPLE_RATE / len(samples)

"""Write audio as MP3, which every browser plays."""

import io

import soundfile

from sbkit.audio.io import Samples

MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz
MP3_COMPRESSION = 0.9  # of libsndfile, from 0 to 1


def encode_mp3(audio: Samples, sample_rate: int) -> bytes:
    """Return audio (S,) int16 at one of `MP3_RATES` as MP3."""
    content = io.BytesIO()
    soundfile.write(content, audio, sample_rate, format="MP3", compression_level=MP3_COMPRESSION)
    return content.getvalue()

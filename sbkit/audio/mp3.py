"""Audio as MP3, which every browser plays, for the pages of reports.

One second of telephone prompts at 16 kHz is 3.7 kB by libsndfile's MP3 at the compression below and
5.6 kB at its usual one; Opus is as small and takes five times as long to encode.
"""

import base64
import io

import numpy as np
import numpy.typing as npt
import soundfile

RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz, of MPEG
COMPRESSION = 0.9  # of libsndfile, from 0 to 1


def encode_mp3(samples: npt.NDArray[np.int16], sample_rate: int) -> str:
    """Encode mono audio at one of RATES, (S,), as MP3 in base64."""
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate, format="MP3", compression_level=COMPRESSION)
    return base64.b64encode(content.getvalue()).decode()

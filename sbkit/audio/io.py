"""Audio files of any kind, as 16 kHz mono int16 samples."""

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from torchaudio.transforms import Resample

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE

Samples = npt.NDArray[np.int16]

FULL_SCALE = 32768  # int16 steps in an amplitude of 1.0
MP3_PADDING = 2 * 1152  # samples: an encoder's delay and its last, partly filled frame
STREAMED = 0x7FFF_0000  # a wav length at or above this was unknown to the program that wrote it


def read_audio(path: Path | str) -> Samples:
    """Read any format soundfile knows, at any rate, as (samples,) int16 at 16 kHz.

    Channels are averaged.

    Raises:
        SbkitError: the file is missing, empty, cut short or no audio.
    """
    path = Path(path)
    _check_file(path)
    samples, rate = _decode(path)
    if not samples.size:
        raise SbkitError(f"An audio file must hold samples, but {path} has none. Replace it.")
    if not np.isfinite(samples).all():
        raise SbkitError(f"Audio samples must be finite, but {path} holds NaN. Replace it.")
    mono = samples.mean(axis=1)  # (samples, channels) -> (samples,)
    scaled = np.rint(_resample(mono, rate) * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def _check_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is missing"
        raise SbkitError(f"{path} must be an audio file, but it {what}. Correct the path.")
    if path.stat().st_size == 0:
        raise SbkitError(f"{path} must be an audio file, but it is empty. Replace it.")


def _decode(path: Path) -> tuple[npt.NDArray[np.float32], int]:
    """Read (samples, channels) and the rate; refuse a file that ends before its header says."""
    try:
        with soundfile.SoundFile(path) as file:
            samples = file.read(dtype="float32", always_2d=True)
            whole = len(samples) >= file.frames - (MP3_PADDING if file.format == "MP3" else 0)
            whole = whole and not _wav_is_cut(file.extra_info)
            whole = whole and not (file.format == "OGG" and _ogg_is_cut(path))
            rate = file.samplerate
    except (soundfile.SoundFileError, TypeError) as error:
        raise SbkitError(_describe(path, str(error))) from error
    if not whole:
        raise SbkitError(_describe(path, "it ends early"))
    return samples, rate


def _describe(path: Path, reason: str) -> str:
    """Tell a file that is no audio from one that began well; only the second can be repaired."""
    if re.search("lost sync|malformed|ends early", reason):
        return f"{path} must be a whole audio file, but is truncated or damaged. Fetch it again."
    return (
        f"{path} must be audio (wav, flac, ogg, opus, mp3 ...), but its content is not recognized "
        "as audio. Replace it."
    )


def _wav_is_cut(log: str) -> bool:
    """Tell whether a wav header promises more bytes than came, which libsndfile merely logs."""
    found = re.search(r"^data : (\d+) \(should be (\d+)\)", log, re.MULTILINE)
    return found is not None and int(found[2]) < int(found[1]) < STREAMED


def _ogg_is_cut(path: Path) -> bool:
    """Tell whether the last ogg page is incomplete: libsndfile drops such a page in silence.

    A page is a header of 27 bytes, the last of which counts its segments, a table with the size of
    each, and their bytes (RFC 3533).
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * 65_307))  # 65 307 bytes: the longest page
        tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27 or len(page) < 27 + page[26]:
        return True
    return len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])


def _resample(mono: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    if rate == SAMPLE_RATE:
        return mono
    resampled = _resampler(rate)(torch.from_numpy(mono))
    return np.asarray(resampled.numpy(), dtype=np.float32)


@cache
def _resampler(rate: int) -> Resample:
    """Build the kernel for one rate once.

    The exact kernel of a rate like 22 051 Hz takes gigabytes. The nearest ratio of small numbers
    is exact for the usual rates, and within 0.05 % for any.
    """
    ratio = Fraction(SAMPLE_RATE, rate).limit_denominator(1000)
    return Resample(ratio.denominator, ratio.numerator)

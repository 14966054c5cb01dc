"""Audio files of any kind, as mono int16 samples of one rate.

file -> blocks (S, channels) float32 -> (S,) mono -> resampled -> int16
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from sbkit.audio.resample import Signal, resample_blocks
from sbkit.audio.truncation import UNCHECKED, UNKNOWN, holds_several, is_truncated
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE

Samples = npt.NDArray[np.int16]

FULL_SCALE = 32768  # int16 steps in an amplitude of 1.0
LOWEST_RATE, HIGHEST_RATE = 4_000, 768_000  # Hz; below, a file of kilobytes can last for days
HIGHEST_PEAK = 16.0  # 24 dB above full scale, where no recording is, but integers in floats are
BLOCK_SECONDS = 60.0  # longer than what is trained on; 35 MB at 48 kHz stereo
BLOCK_VALUES = 1 << 24  # samples of all channels in a block; 64 MB
SUFFIXES = (  # of files that are looked for in folders
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
    *(".aiff", ".aif", ".au", ".caf", ".rf64", ".sph", ".w64"),
)

# How other containers begin (offset, bytes), which hold audio that libsndfile does not decode.
FOREIGN = {
    "MP4 or M4A": (4, b"ftyp"),
    "WMA": (0, b"\x30\x26\xb2\x75"),
    "Matroska or WebM": (0, b"\x1a\x45\xdf\xa3"),
    "AMR": (0, b"#!AMR"),
}


class AudioError(SbkitError):
    """An audio file that cannot be read.

    Attributes:
        reason: what it is, in a few words that can be counted: "missing", "empty", "cut short" ...
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def audio_below(folder: Path) -> list[Path]:
    """List the audio files below a folder, sorted; hidden ones, as macOS leaves, are none."""
    return sorted(
        each
        for each in folder.rglob("*")
        if each.suffix.lower() in SUFFIXES and not each.name.startswith(".")
    )


def read_audio(path: Path | str, sample_rate: int = SAMPLE_RATE) -> Samples:
    """Read any format soundfile knows, at any rate, as (S,) int16; channels are averaged.

    Raises:
        AudioError: the file is missing, empty, cut short or no audio.
    """
    content = bytearray()  # grows in place, so that a long file is in memory once
    for block in stream_audio(path, sample_rate):
        content += block.tobytes()
    return np.frombuffer(content, np.int16)


def stream_audio(
    path: Path | str, sample_rate: int = SAMPLE_RATE, block_seconds: float = BLOCK_SECONDS
) -> Iterator[Samples]:
    """Read as `read_audio` does, and yield blocks (S,) of about ``block_seconds``.

    That a file is cut short, or is too loud, may be known at its end only.

    Raises:
        AudioError: the file is missing, empty, cut short or no audio.
    """
    path = Path(path)
    _check_file(path)
    try:
        with _Reader(os.fsencode(path)) as file:  # a name of other bytes than UTF-8, too
            _check_header(path, file)
            blocks = _mono_blocks(path, file, block_seconds)
            yield from map(_to_int16, resample_blocks(blocks, file.samplerate, sample_rate))
    except AudioError:
        raise
    except Exception as error:  # whatever a damaged file does to a library, it is this file's
        raise _describe(path, error) from error


def declared_seconds(path: Path | str) -> float:
    """Return how long a file says that it is, 0 where it cannot be read; for a progress bar."""
    try:
        _check_file(Path(path))
        info = soundfile.info(os.fsencode(path))
    except (AudioError, OSError, RuntimeError):
        return 0.0
    return float(info.duration) if info.frames < UNKNOWN else 0.0


def convert_array(
    array: npt.NDArray[Any], sample_rate: int | None, new_rate: int = SAMPLE_RATE
) -> Iterator[Samples]:
    """Convert samples of a program as a file's are, and yield them as one block (S,).

    array: (S,) or (S, channels), of int16, or of floats between -1 and 1.

    Raises:
        AudioError: it is empty, of another type or shape, or not finite.
    """
    if sample_rate is None or not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise AudioError(
            "sample rate out of range",
            f"An array must come with its sample rate, from {LOWEST_RATE} to {HIGHEST_RATE} Hz, "
            f"but came with {sample_rate}. Pass `sample_rate`.",
        )
    samples = np.asarray(array)
    if samples.ndim not in (1, 2) or not samples.size or samples.dtype.kind not in "if":
        raise AudioError(
            "not audio",
            "An array of audio must hold numbers in the shape (samples,) or (samples, channels), "
            f"but is {samples.dtype} of the shape {samples.shape}. Convert it.",
        )
    if samples.dtype.kind == "i" and samples.dtype != np.int16:
        raise AudioError(
            "samples out of range",
            f"An array of whole numbers must be of int16, but is of {samples.dtype}. Convert it to "
            "int16, or to floats between -1 and 1.",
        )
    scale = FULL_SCALE if samples.dtype == np.int16 else 1
    floats = samples.reshape(len(samples), -1).astype(np.float32) / np.float32(scale)
    _check_values("the array", floats)
    mono = floats.mean(axis=1)
    yield from map(_to_int16, resample_blocks([mono], sample_rate, new_rate))


def _to_int16(block: Signal) -> Samples:
    scaled = np.rint(block * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


class _Reader(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read from its start to its end."""

    def seekable(self) -> bool:
        """Deny it: soundfile seeks after each read, which fails where the length is unknown."""
        return False


def _check_file(path: Path) -> None:
    def refuse(reason: str, what: str, todo: str) -> AudioError:
        return AudioError(reason, f"{path} must be an audio file, but it {what}. {todo}")

    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise refuse("missing", "is missing", "Correct the path.") from error
    except (OSError, ValueError) as error:  # a loop of links, a folder that may not be entered
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse("unreachable", f"cannot be reached ({reason})", "Repair the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise refuse("a folder", "is a folder", "Correct the path.")
    if not stat.S_ISREG(status.st_mode):
        raise refuse("no regular file", "is a pipe or a device", "Write its audio to a file.")
    if status.st_size == 0:
        raise refuse("empty", "is empty", "Replace it.")


def _check_header(path: Path, file: soundfile.SoundFile) -> None:
    if not LOWEST_RATE <= file.samplerate <= HIGHEST_RATE:
        raise AudioError(
            "sample rate out of range",
            f"A sample rate must be from {LOWEST_RATE} to {HIGHEST_RATE} Hz, but {path} declares "
            f"{file.samplerate} Hz. Replace the file.",
        )
    if file.format in UNCHECKED:
        raise AudioError(
            "format that cannot be checked",
            f"An audio file must be of a format whose header shows a truncated file, but {path} is "
            f"{file.format}. Convert it to wav or flac.",
        )


def _mono_blocks(path: Path, file: soundfile.SoundFile, seconds: float) -> Iterator[Signal]:
    """Yield the averaged channels (S, channels) -> (S,), and refuse a file that ends too early."""
    longest = min(round(seconds * file.samplerate), BLOCK_VALUES // file.channels)
    buffer = np.empty((max(1, min(longest, file.frames)), file.channels), np.float32)
    total = 0
    while len(block := file.read(out=buffer)):
        _check_values(path, block)
        total += len(block)
        yield block.mean(axis=1)
    if is_truncated(path, file, total):
        raise _cut_short(path)
    if holds_several(path, file.format):
        raise AudioError(
            "several recordings",
            f"An audio file must hold one recording, but {path} holds several, of which only the "
            "first can be read. Join their samples, or give them one by one.",
        )
    if not total:
        raise AudioError(
            "no samples",
            f"An audio file must hold samples, but {path} has none. Replace it.",
        )


def _check_values(path: Path | str, block: npt.NDArray[np.float32]) -> None:
    peak = float(np.abs(block).max())
    if not np.isfinite(peak):
        raise AudioError(
            "samples that are not finite",
            f"Audio samples must be finite, but {path} holds NaN or infinity. Replace it.",
        )
    if peak >= HIGHEST_PEAK:
        raise AudioError(
            "samples out of range",
            f"Samples stored as floats must lie between -1 and 1, but those of {path} reach "
            f"{peak:g}, as integers would. Divide them by the full scale of their format (32768 "
            "for 16 bits).",
        )


def _describe(path: Path, error: Exception) -> AudioError:
    """Distinguish no audio from a file that began well; only the second can be repaired."""
    if re.search("lost sync|malformed", getattr(error, "error_string", str(error))):
        return _cut_short(path)
    if isinstance(error, OSError | MemoryError):
        reason = getattr(error, "strerror", None) or "not enough memory"
        return AudioError(
            "unreachable", f"{path} must be readable, but is not: {reason}. Repair that."
        )
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as failure:
        return _describe(path, failure)
    for name, (offset, magic) in FOREIGN.items():
        if start[offset : offset + len(magic)] == magic:
            return AudioError(
                "another container",
                f"{path} must be wav, flac, ogg, opus or mp3, but is {name}. Convert it, for "
                "example to flac.",
            )
    return AudioError(
        "not audio",
        f"{path} must be audio (wav, flac, ogg, opus, mp3 ...), but its content is not recognized "
        "as audio. Replace it.",
    )


def _cut_short(path: Path) -> AudioError:
    return AudioError(
        "cut short or damaged",
        f"{path} must be a whole audio file, but is truncated or damaged. Fetch it again.",
    )

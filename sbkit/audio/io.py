"""Audio files of any kind, as mono int16 samples of one rate.

file -> blocks (S, channels) float32 -> (S,) mono -> resampled -> int16

libsndfile reads a file that was cut short up to its end, and for most formats at most logs that
the header declared more: what the header says of the length is compared with what is there.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from sbkit.audio.resample import Signal, resample_blocks
from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.base.units import SAMPLE_RATE

Samples = npt.NDArray[np.int16]

STANDARD = Path("-")  # input or output
FULL_SCALE = 32768  # int16 steps in an amplitude of 1.0
LOWEST_RATE, HIGHEST_RATE = 4_000, 768_000  # Hz; below, a file of kilobytes can last for days
HIGHEST_PEAK = 16.0  # 24 dB above full scale, where no recording is, but integers in floats are
MAX_CHANNELS = 32  # of an array; microphone arrays have up to so many
BLOCK_SECONDS = 60.0  # longer than what is trained on; 35 MB at 48 kHz stereo
BLOCK_VALUES = 1 << 24  # samples of all channels in a block; 64 MB
SUFFIXES = (  # of files that are looked for in folders
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
    *(".aiff", ".aif", ".au", ".caf", ".sph", ".w64"),
)
# Formats of which it is seen that a file is cut short.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST", "W64")
MP3_PADDING = 2 * 1152  # samples: an encoder's delay and its last, partly filled frame
STREAMED = 0x7FFF_0000  # a length at or above this was unknown to the program that wrote it
UNKNOWN = 1 << 40  # frames; at 768 kHz more than two weeks, and so no length at all
LONGEST_OGG_PAGE = 65_307  # bytes (RFC 3533)

# "<name> : <declared bytes> (should be <bytes that are there>)", for chunks that hold audio.
_CHUNK = re.compile(r"^ *(?:data|SSND|riff|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)


class AudioError(SbkitError):
    """An audio file that cannot be read.

    Attributes:
        reason: what it is, in a few words that can be counted: "missing", "cut short" ...
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
        AudioError: the file is missing, cut short or no audio.
    """
    content = bytearray()  # grows in place, so that a long file is in memory once
    for block in stream_audio(path, sample_rate):
        content += block.tobytes()
    return np.frombuffer(content, np.int16)


def stream_audio(
    source: Path | str | IOBase,
    sample_rate: int = SAMPLE_RATE,
    block_seconds: float = BLOCK_SECONDS,
) -> Iterator[Samples]:
    """Read as `read_audio` does, and yield blocks (S,) of about ``block_seconds``.

    source: a path, or an open binary file, which is read from its start.

    That a file is cut short, or is too loud, may be known at its end only.

    Raises:
        AudioError: the file is missing, cut short or no audio.
    """
    path = "the file" if isinstance(source, IOBase) else Path(source)
    if isinstance(path, Path) and not path.is_file():
        raise AudioError(
            "missing", f"{path} must be an audio file, but is missing or no file. Correct the path."
        )
    try:
        with _Reader(_from_start(source)) as file:
            _check_header(path, file)
            blocks = _mono_blocks(source, path, file, block_seconds)
            yield from map(to_int16, resample_blocks(blocks, file.samplerate, sample_rate))
    except AudioError:
        raise
    except Exception as error:  # whatever a damaged file does to a library, it is this file's
        raise _describe(path, error) from error


def declared_seconds(source: Path | str | IOBase) -> float:
    """Return how long a file says that it is, 0 where it cannot be read; for a progress bar."""
    if not isinstance(source, IOBase) and not Path(source).is_file():
        return 0.0
    try:
        info = soundfile.info(_from_start(source))
    except RuntimeError:
        return 0.0
    return float(info.duration) if info.frames < UNKNOWN else 0.0


def _from_start(source: Path | str | IOBase) -> bytes | IOBase:
    """Return what soundfile opens: the bytes of a path, or a file at its start."""
    if isinstance(source, IOBase):
        source.seek(0)
        return source
    return os.fsencode(source)


def convert_array(
    array: npt.NDArray[Any], sample_rate: int | None, new_rate: int = SAMPLE_RATE
) -> Iterator[Samples]:
    """Convert one clip of a program as a file's is, and yield it as one block (S,).

    array: as for `to_samples`, at ``sample_rate``.

    Raises:
        AudioError: it is empty, of another type or shape, or not finite.
    """
    rate = sample_rate or 0
    check_rate("the array", rate)
    mono = _average_channels(np.asarray(array))
    if not len(mono):
        raise AudioError("no samples", "The array holds no samples.")
    yield from map(to_int16, resample_blocks([mono], rate, new_rate))


def to_samples(array: npt.NDArray[Any]) -> Samples:
    """Convert audio at the rate of a model to (S,) int16; all that takes samples calls this.

    array: int16, or floats between -1 and 1, or such a tensor on the CPU, of the shape (S,),
    (S, channels) as soundfile returns it, or (channels, S) as torchaudio does. Channels are
    averaged. They are a side of 1, or of at most MAX_CHANNELS beside a side that is longer.

    Raises:
        AudioError: it is of another type or shape, or not finite.
    """
    samples = np.asarray(array)
    is_converted = samples.dtype == np.int16 and samples.ndim == 1
    return samples if is_converted else to_int16(_average_channels(samples))


def _average_channels(samples: npt.NDArray[Any]) -> Signal:
    """Average the channels of what `to_samples` takes -> (S,) between -1 and 1."""
    sides = sorted(samples.shape)
    is_mono = len(sides) == 1 or (len(sides) == 2 and sides[0] == 1)
    has_channels = len(sides) == 2 and 1 < sides[0] <= MAX_CHANNELS < sides[1]
    is_known = samples.dtype == np.int16 or samples.dtype.kind == "f"
    if not is_known or not (is_mono or has_channels):
        raise AudioError(
            "not audio",
            "An array of audio must hold int16, or floats between -1 and 1, in the shape "
            f"(samples,), (samples, channels) or (channels, samples), with at most {MAX_CHANNELS} "
            f"channels and more samples than that, but this one holds {samples.dtype} in the shape "
            f"{samples.shape}. Pass one clip, best as (samples,).",
        )
    channels = np.atleast_2d(samples.T if len(samples) == sides[-1] else samples)  # (channels, S)
    scale = FULL_SCALE if samples.dtype == np.int16 else 1
    floats = channels.astype(np.float32) / np.float32(scale)
    _check_values("the array", floats)
    mono: Signal = floats.mean(axis=0)
    return mono


def to_int16(block: Signal) -> Samples:
    """Round samples between -1 and 1 to int16: (S,) -> (S,)."""
    scaled = np.rint(block * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def write_wav(file: Path, samples: Samples, sample_rate: int) -> None:
    """Write samples (S,) as WAV, whole or not at all; to standard output where the file is `-`."""
    soundfile.write(wav := io.BytesIO(), samples, sample_rate, format="WAV")
    if file == STANDARD:
        sys.stdout.buffer.write(wav.getvalue())
    else:
        write_bytes_atomically(file, wav.getvalue())


class _Reader(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read from its start to its end."""

    def seekable(self) -> bool:
        """Deny it: soundfile seeks after each read, which fails where the length is unknown."""
        return False


def check_rate(name: Path | str, rate: int) -> None:
    """Raise AudioError for a rate in Hz that no recording has; ``name`` says whose it is."""
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise AudioError(
            "sample rate out of range",
            f"A sample rate must be from {LOWEST_RATE} to {HIGHEST_RATE} Hz, but {name} declares "
            f"{rate} Hz. Correct that.",
        )


def _check_header(path: Path | str, file: soundfile.SoundFile) -> None:
    check_rate(path, file.samplerate)
    if file.format not in FORMATS:
        raise AudioError(
            "format that cannot be checked",
            f"An audio file must be of a format whose header shows a truncated file, but {path} is "
            f"{file.format}. Convert it to wav or flac.",
        )


def _mono_blocks(
    source: Path | str | IOBase, path: Path | str, file: soundfile.SoundFile, seconds: float
) -> Iterator[Signal]:
    """Yield the averaged channels (S, channels) -> (S,), and refuse a file that ends too early."""
    longest = min(round(seconds * file.samplerate), BLOCK_VALUES // file.channels)
    buffer = np.empty((max(1, min(longest, file.frames)), file.channels), np.float32)
    total = 0
    while len(block := file.read(out=buffer)):
        _check_values(path, block)
        total += len(block)
        yield block.mean(axis=1)
    if _is_truncated(source, file, total):
        raise _cut_short(path)
    if not total:
        raise AudioError(
            "no samples", f"An audio file must hold samples, but {path} has none. Replace it."
        )


def _check_values(path: Path | str, block: npt.NDArray[np.float32]) -> None:
    peak = float(np.abs(block).max(initial=0))
    if not peak < HIGHEST_PEAK:  # NaN, too
        raise AudioError(
            "samples out of range",
            f"Samples stored as floats must lie between -1 and 1, but those of {path} reach "
            f"{peak:g}. Divide integers by the full scale of their format (32768 for 16 bits).",
        )


def _is_truncated(source: Path | str | IOBase, file: soundfile.SoundFile, frames_read: int) -> bool:
    """Return whether a file, read to its end, lacks some of what its header declares."""
    padding = MP3_PADDING if file.format == "MP3" else 0
    chunks = _CHUNK.findall(file.extra_info)
    return (
        frames_read + padding < file.frames < UNKNOWN
        or any(int(there) < int(declared) < STREAMED for declared, there in chunks)
        or (file.format == "OGG" and _ogg_is_truncated(source))
        or (file.format == "NIST" and _nist_is_truncated(source))
    )


def _ogg_is_truncated(source: Path | str | IOBase) -> bool:
    """Return whether the last ogg page is incomplete: libsndfile drops such a page in silence.

    A page is a header of 27 bytes, the last of which counts its segments, a table with the size of
    each, and their bytes (RFC 3533).
    """
    with _bytes_of(source) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LONGEST_OGG_PAGE))
        tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])


def _nist_is_truncated(source: Path | str | IOBase) -> bool:
    """Compare a NIST/SPHERE header with the file's size.

    The header is text: "NIST_1A", its own size in bytes, then a line "name -type value" per field.
    """
    with _bytes_of(source) as file:
        header, length = file.read(1024).decode("latin-1"), file.seek(0, os.SEEK_END)
    size = int(header.split("\n")[1])
    fields = dict(re.findall(r"^(\w+) -\w+ (\S+)", header, re.MULTILINE))
    names = ("sample_count", "channel_count", "sample_n_bytes")
    count, channels, width = (int(fields.get(name, 1)) for name in names)
    return bool(length < size + count * channels * width)


@contextmanager
def _bytes_of(source: Path | str | IOBase) -> Iterator[Any]:
    """Open a file at its start; close it unless it was open."""
    if isinstance(source, IOBase):
        source.seek(0)
        yield source
    else:
        with Path(source).open("rb") as file:
            yield file


def _describe(path: Path | str, error: Exception) -> AudioError:
    """Distinguish no audio from a file that began well; only the second can be repaired."""
    if re.search("lost sync|malformed", getattr(error, "error_string", str(error))):
        return _cut_short(path)
    if isinstance(error, OSError | MemoryError) or (
        isinstance(path, Path) and not os.access(path, os.R_OK)
    ):
        return AudioError(
            "unreachable", f"{path} must be readable, but is not ({error}). Repair that."
        )
    return AudioError(
        "not audio",
        f"{path} must be audio (wav, flac, ogg, opus, mp3 ...), but its content is not recognized "
        "as audio. Replace it, or convert it to flac.",
    )


def _cut_short(path: Path | str) -> AudioError:
    return AudioError(
        "cut short or damaged",
        f"{path} must be a whole audio file, but is truncated or damaged. Fetch it again.",
    )

"""Audio files of any format, as mono int16 samples of one rate.

file -> blocks (S, channels) float32 -> (S,) mono -> resampled -> int16

libsndfile reads a truncated file to its end; for most formats it only logs that the header declares
more. So the declared length is compared with the file.
"""

import io
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import IOBase
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile

from sbkit.audio.resample import Signal, resample_blocks
from sbkit.base.errors import DataError
from sbkit.base.files import write_bytes_atomically
from sbkit.base.units import (
    MICROSECONDS,
    SAMPLE_RATE,
    microseconds_to_samples,
    samples_to_seconds,
)

Samples = npt.NDArray[np.int16]
Source = Path | str | IOBase  # a file by its path, or open for reading bytes

STANDARD = Path("-")  # standard input or output
FULL_SCALE = 32768  # int16 steps in an amplitude of 1.0
MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 768_000  # at lower rates a file of kilobytes can last for days
MAX_PEAK = 16.0  # 24 dB above full scale: no recording reaches it, but integers in floats do
MAX_CHANNELS = 32  # large microphone arrays have as many
BLOCK_SECONDS = 60.0  # longer than training clips; 35 MB at 48 kHz stereo
MAX_BLOCK_VALUES = 1 << 24  # samples of all channels in a block; 64 MB
SUFFIXES = (  # of files that are taken from folders, the usual ones first
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
    *(".aiff", ".aif", ".au", ".caf", ".sph", ".w64"),
)
# A truncated file can be detected in these formats.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST", "W64")
MP3_PADDING = 2 * 1152  # samples: an encoder's delay and its last, partly filled frame
STREAMED_BYTES = 0x7FFF_0000  # programs that stream declare this length or more
UNKNOWN_FRAMES = 1 << 40  # at 768 kHz more than two weeks, so no real length
MAX_OGG_PAGE_BYTES = 65_307  # RFC 3533
END_TOLERANCE = 50_000  # microseconds that a part may exceed its file, because tools round
BEYOND_END = "part beyond the end of its file"  # the reason of an AudioError

# "<name> : <declared bytes> (should be <actual bytes>)", for chunks that hold audio.
_CHUNK = re.compile(r"^ *(?:data|SSND|riff|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)


class AudioError(DataError):
    """Raised for an audio file that cannot be read."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # a category for counting: "missing", "no samples" ...


class AudioPart(NamedTuple):
    """An audio file or a part of it; times are whole microseconds, and so compare exactly.

    The end of one part and the same time as the start of the next are rounded to the same sample.

    >>> str(AudioPart("/data/talk.mp3", 1_500_000, 4_000_000))
    '1.5 to 4 s of talk.mp3'
    """

    path: str
    start: int = 0
    end: int | None = None  # None: the end of the file

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    def __str__(self) -> str:
        name = Path(self.path).name
        end = "the end" if self.end is None else f"{self.end / MICROSECONDS:.12g} s"
        return name if self.is_whole else f"{self.start / MICROSECONDS:.12g} to {end} of {name}"


def find_audio_files(folder: Path) -> list[Path]:
    """List the audio files below a folder, sorted; hidden ones, which macOS leaves, are skipped."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )


def read_audio(path: Path | str, sample_rate: int = SAMPLE_RATE) -> Samples:
    """Read a file of any format and rate as (S,) int16; channels are averaged.

    Raises:
        AudioError: the file is missing, truncated or not audio.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_wav(file := Path(folder, "tone.wav"), np.ones(8000, np.int16), 8_000)
    ...     read_audio(file, 16_000).shape
    (16000,)
    """
    content = bytearray()  # grows in place: a long file is in memory only once
    for block in stream_audio(path, sample_rate):
        content += block.tobytes()
    return np.frombuffer(content, np.int16)


def stream_audio(
    source: Source, sample_rate: int = SAMPLE_RATE, block_seconds: float = BLOCK_SECONDS
) -> Iterator[Samples]:
    """Read like `read_audio`, and yield blocks (S,) of about ``block_seconds``.

    An open file is read from its start. A truncated file may only be detected at its end.
    """
    name = "the file" if isinstance(source, IOBase) else str(Path(source))
    if not isinstance(source, IOBase) and not Path(source).is_file():
        raise AudioError("missing", f"Audio file {name} does not exist or is not a file.")
    try:
        with _UnseekableFile(_from_start(source)) as file:
            check_rate(name, file.samplerate)
            if file.format not in FORMATS:
                raise AudioError(
                    "format that cannot be checked",
                    f"Format {file.format} of {name} is not supported because truncation cannot be "
                    "detected. Convert the file to wav or flac.",
                )
            blocks = _mono_blocks(source, name, file, block_seconds)
            yield from map(to_int16, resample_blocks(blocks, file.samplerate, sample_rate))
    except AudioError:
        raise
    except Exception as error:  # a damaged file may make a library raise anything
        raise _describe(source, name, error) from error


def read_parts(parts: Sequence[AudioPart], sample_rate: int) -> Iterator[Samples | AudioError]:
    """Read parts of one file, sorted by start, as slices of what `read_audio` returns: (S,).

    The file is read once, up to the end of the last part. One block is in memory, and the samples
    from the start of the next part on. A part that cannot be read gives an error in its place. A
    part that exceeds the file by END_TOLERANCE or less ends with the file.
    """
    path = parts[0].path
    waiting = deque(parts)
    content = bytearray()  # of samples from index `first` on; grows and shrinks in place
    first = 0

    def to_bytes(time: int) -> int:
        return 2 * (microseconds_to_samples(time, sample_rate) - first)

    def cut(part: AudioPart) -> Samples:
        end = None if part.end is None else to_bytes(part.end)
        return np.frombuffer(bytes(content[to_bytes(part.start) : end]), np.int16)

    try:
        for block in stream_audio(path, sample_rate):
            content += block.tobytes()
            while (end := waiting[0].end) is not None and to_bytes(end) <= len(content):
                yield cut(waiting.popleft())
                if not waiting:
                    return
            num_passed = min(to_bytes(waiting[0].start), len(content)) // 2
            del content[: 2 * num_passed]
            first += num_passed
    except AudioError as error:
        yield from [error] * len(waiting)
        return
    seconds = samples_to_seconds(first + len(content) // 2, sample_rate)
    for part in waiting:
        is_inside = part.end is None or part.end <= seconds * MICROSECONDS + END_TOLERANCE
        if is_inside and to_bytes(part.start) < len(content):
            yield cut(part)
        else:
            yield AudioError(BEYOND_END, f"{part}: the file {path} lasts only {seconds:.3f} s.")


def declared_seconds(source: Source) -> float:
    """Return the duration that a file declares, 0 if it cannot be read; for a progress bar."""
    if not isinstance(source, IOBase) and not Path(source).is_file():
        return 0.0
    try:
        info = soundfile.info(_from_start(source))
    except RuntimeError:
        return 0.0
    return float(info.duration) if info.frames < UNKNOWN_FRAMES else 0.0


def _from_start(source: Source) -> bytes | IOBase:
    """Return the argument for soundfile: a path as bytes, or a file at its start."""
    if isinstance(source, IOBase):
        source.seek(0)
        return source
    return os.fsencode(source)


def convert_array(
    array: npt.NDArray[np.generic], sample_rate: int | None, new_rate: int = SAMPLE_RATE
) -> Iterator[Samples]:
    """Convert a clip in memory like a file, and yield it as one block (S,)."""
    rate = sample_rate or 0
    check_rate("the array", rate)
    mono = _average_channels(np.asarray(array))
    if not len(mono):
        raise AudioError("no samples", "The audio array is empty.")
    yield from map(to_int16, resample_blocks([mono], rate, new_rate))


def to_samples(array: npt.NDArray[np.generic]) -> Samples:
    """Convert an array of audio to (S,) int16; every public function that takes samples calls this.

    array: int16, or floats between -1 and 1, or such a tensor on the CPU, of shape (S,), (S,
        channels) as from soundfile, or (channels, S) as from torchaudio. Channels are averaged.
        There is one, or there are at most MAX_CHANNELS, and more samples than that.

    Raises:
        AudioError: the array is not finite, or has another type or shape.

    >>> to_samples(np.array([0.0, 0.5, -1.0]))
    array([     0,  16384, -32768], dtype=int16)
    """
    samples = np.asarray(array)
    is_converted = samples.dtype == np.int16 and samples.ndim == 1
    return samples if is_converted else to_int16(_average_channels(samples))


def _average_channels(samples: npt.NDArray[np.generic]) -> Signal:
    """Check an array as `to_samples` documents; average its channels: -> (S,) between -1 and 1."""
    sides = sorted(samples.shape)
    is_mono = len(sides) == 1 or (len(sides) == 2 and sides[0] == 1)
    has_channels = len(sides) == 2 and 1 < sides[0] <= MAX_CHANNELS < sides[1]
    is_supported = samples.dtype == np.int16 or samples.dtype.kind == "f"
    if not is_supported or not (is_mono or has_channels):
        raise AudioError(
            "not audio",
            f"An audio array of {samples.dtype} with shape {samples.shape} is not supported. Pass "
            "one clip of int16, or of floats between -1 and 1: (samples,), (samples, channels) or "
            f"(channels, samples), of at most {MAX_CHANNELS} channels and more samples than that.",
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
    """Write samples (S,) as WAV, atomically; to standard output if the file is `-`."""
    soundfile.write(wav := io.BytesIO(), samples, sample_rate, format="WAV")
    if file == STANDARD:
        sys.stdout.buffer.write(wav.getvalue())
    else:
        write_bytes_atomically(file, wav.getvalue())


def write_flac(file: Path, samples: Samples, sample_rate: int) -> None:
    """Write samples (S,) as FLAC, about half the size of WAV, atomically."""
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate, format="FLAC")
    write_bytes_atomically(file, content.getvalue())


class _UnseekableFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file in which soundfile does not seek after each read: without a length, seeking fails."""

    def seekable(self) -> bool:
        return False


def check_rate(name: str, rate: int) -> None:
    """Raise AudioError for a rate in Hz that no recording has; ``name`` says what declares it."""
    if not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
        raise AudioError(
            "sample rate out of range",
            f"A sample rate must be from {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz, but {name} declares "
            f"{rate} Hz.",
        )


def _mono_blocks(
    source: Source, name: str, file: soundfile.SoundFile, seconds: float
) -> Iterator[Signal]:
    """Yield blocks with averaged channels, (S,); raise AudioError for a truncated file."""
    max_frames = min(round(seconds * file.samplerate), MAX_BLOCK_VALUES // file.channels)
    buffer = np.empty((max(1, min(max_frames, file.frames)), file.channels), np.float32)
    frames_read = 0
    while len(block := file.read(out=buffer)):
        _check_values(name, block)
        frames_read += len(block)
        yield block.mean(axis=1)
    if _is_truncated(source, file, frames_read):
        raise _cut_short(name)
    if not frames_read:
        raise AudioError("no samples", f"{name} has no samples.")


def _check_values(name: str, block: npt.NDArray[np.float32]) -> None:
    peak = float(np.abs(block).max(initial=0))
    if not peak < MAX_PEAK:  # also true for NaN
        raise AudioError(
            "samples out of range",
            f"Samples stored as floats must lie between -1 and 1, but {name} reaches {peak:g}. "
            "Divide integers by the full scale of their format (32768 for 16 bits).",
        )


def _is_truncated(source: Source, file: soundfile.SoundFile, frames_read: int) -> bool:
    """Check whether a file that was read to its end has fewer frames or bytes than it declares."""
    padding = MP3_PADDING if file.format == "MP3" else 0
    chunks = _CHUNK.findall(file.extra_info)
    return (
        frames_read + padding < file.frames < UNKNOWN_FRAMES
        or any(int(actual) < int(declared) < STREAMED_BYTES for declared, actual in chunks)
        or (file.format == "OGG" and _ogg_is_truncated(source))
        or (file.format == "NIST" and _nist_is_truncated(source))
    )


def _ogg_is_truncated(source: Source) -> bool:
    """Check whether the last ogg page is incomplete: libsndfile silently drops such a page.

    A page has a header of 27 bytes, whose last byte counts the segments, a table with the size of
    each segment, and their bytes (RFC 3533).
    """
    with _bytes_of(source) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * MAX_OGG_PAGE_BYTES))
        tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])


def _nist_is_truncated(source: Source) -> bool:
    """Check whether a NIST/SPHERE file is smaller than its header declares.

    The header is text: "NIST_1A", its size in bytes, then a line "name -type value" per field.
    """
    with _bytes_of(source) as file:
        header = file.read(1024).decode("latin-1")
        length = file.seek(0, os.SEEK_END)
    header_bytes = int(header.split("\n")[1])
    fields = dict(re.findall(r"^(\w+) -\w+ (\S+)", header, re.MULTILINE))
    names = ("sample_count", "channel_count", "sample_n_bytes")
    return bool(length < header_bytes + prod(int(fields.get(name, 1)) for name in names))


def _bytes_of(source: Source) -> AbstractContextManager[IOBase]:
    """Open a file at its start; a file that was open before stays open."""
    if isinstance(source, IOBase):
        source.seek(0)
        return nullcontext(source)
    return Path(source).open("rb")


def _describe(source: Source, name: str, error: Exception) -> AudioError:
    """Return the error of a file: truncated, unreachable, or not audio."""
    if re.search("lost sync|malformed", getattr(error, "error_string", str(error))):
        return _cut_short(name)
    is_readable = isinstance(source, IOBase) or os.access(source, os.R_OK)
    if isinstance(error, OSError | MemoryError) or not is_readable:
        return AudioError("unreachable", f"{name} cannot be read: {error}")
    return AudioError(
        "not audio",
        f"The content of {name} is not recognized as audio (wav, flac, ogg, opus, mp3 ...). "
        "Replace the file, or convert it to flac.",
    )


def _cut_short(name: str) -> AudioError:
    return AudioError("cut short or damaged", f"{name} is truncated or damaged. Download it again.")

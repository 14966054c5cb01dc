"""Audio files of any format, as mono int16 samples of one rate.

file -> blocks (S,) of float32 at its own rate -> resampled -> int16

Blocks are resampled one by one, with the same result as the whole. soxr was up to 4.2 times as fast
as FFmpeg's resampler; tones up to 0.9 of the lower Nyquist frequency had errors below -60 dB
instead of -19, and aliases below -130 dB instead of -22.
"""

import io
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from fnmatch import fnmatchcase
from glob import has_magic
from inspect import iscoroutinefunction
from itertools import groupby
from numbers import Number
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from sbkit.audio import decode
from sbkit.audio.channels import Downmixer
from sbkit.audio.containers import AudioError, ends_early
from sbkit.audio.decode import CUT_NOTE, Block, ReadOptions, Signal, check_rate, check_values
from sbkit.base.files import write_bytes_atomically
from sbkit.base.messages import listed, note_once, plural
from sbkit.base.ranges import DAY
from sbkit.base.units import MICROSECONDS, SAMPLE_RATE, microseconds_to_samples, samples_to_seconds
from sbkit.base.versions import AUDIO_PACKAGES, package_versions

logger = logging.getLogger(__name__)

Samples = npt.NDArray[np.int16]


class Readable(Protocol):
    """What is open for reading bytes: a file, or an upload to a web server."""

    def read(self, size: int = -1, /) -> bytes: ...


# A file by its path, open for reading bytes, or its bytes.
AudioFile = str | PathLike[str] | Readable | bytes | bytearray | memoryview
# Also an array or a tensor, a pair of it and its rate, and the mappings of `file_or_array`.
AudioLike = AudioFile | npt.NDArray[Any] | tuple[Any, Any] | Mapping[str, Any]

DECODING_VERSION = 7  # raised with each change of decoded samples, or of shards
STANDARD = Path("-")  # standard input or output
FULL_SCALE = 32768  # int16 steps in an amplitude of 1.0
MAX_ARRAY_CHANNELS = 32  # of an array; large microphone arrays have as many
READ_BLOCK_SECONDS = 60.0  # longer than training clips; 35 MB at 48 kHz stereo
SUFFIXES = (  # of files that are taken from folders, the usual ones first
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".webm", ".mp4", ".aac"),
    *(".aiff", ".aif", ".au", ".caf", ".sph", ".w64", ".mov", ".mka", ".mkv", ".3gp", ".amr"),
    *(".wma", ".ac3", ".eac3", ".mp2", ".mpga", ".mpeg", ".ts", ".ape", ".wv", ".tta", ".voc"),
    *(".avi", ".flv", ".wave", ".bwf", ".rf64", ".aifc", ".snd", ".nist", ".m4b", ".m4r", ".m4v"),
    *(".weba", ".mpg", ".m2a", ".mts", ".m2ts", ".vob", ".3g2", ".3gpp", ".ogv", ".ogx", ".awb"),
    *(".wmv", ".asf", ".dsf"),
)
BEYOND_END = "span beyond the end of its file"  # the reason of an AudioError
MAX_CLIP_SECONDS = DAY  # 2.8 GB at 16 kHz; as much as `max_seconds` allows
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz
MP3_COMPRESSION = 0.9  # of libsndfile, from 0 to 1
NO_SIGNAL: Signal = np.empty(0, np.float32)


class AudioSpan(NamedTuple):
    """An audio file, or a span or a channel of it; times are whole microseconds: they are exact.

    >>> str(AudioSpan("/data/talk.mp3", 1_500_000, 4_000_000))
    '1.5 to 4 s of talk.mp3'
    """

    path: str
    start: int = 0
    end: int | None = None  # None: the end of the file
    channel: int | None = None  # counted from 0; None: all are downmixed

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    @property
    def is_file(self) -> bool:
        """Whether the span is all of the file, with all of its channels."""
        return self.is_whole and self.channel is None

    def __str__(self) -> str:
        name = Path(self.path).name
        if self.channel is not None:
            name = f"channel {self.channel} of {name}"
        end = "the end" if self.end is None else f"{self.end / MICROSECONDS:.12g} s"
        return name if self.is_whole else f"{self.start / MICROSECONDS:.12g} to {end} of {name}"


def decoding_versions() -> dict[str, Any]:
    """Return the versions of the code and of the packages that decode audio."""
    return {"code": DECODING_VERSION, "packages": package_versions(AUDIO_PACKAGES)}


def find_audio_files(folder: Path, pattern: Sequence[str] = ("*",)) -> list[Path]:
    """List the audio files below a folder that match the parts of a glob pattern, sorted.

    A folder that the last part matches is searched to any depth, links included, but no folder
    twice. Hidden files and unknown endings are skipped and counted in a note, unless the pattern
    names the dot or the ending.
    """
    files, hidden, unknown = set[Path](), set[Path](), set[Path]()
    folders: list[tuple[Path, Sequence[str]]] = [(folder, pattern)]
    visited: set[tuple[object, ...]] = set()
    while folders:
        parent, (part, *inner) = folders.pop()
        try:
            status, paths = parent.stat(), sorted(parent.iterdir())
        except OSError as error:
            logger.warning(f"{parent} cannot be searched ({error.strerror}).")
            continue
        if (visit := (status.st_dev, status.st_ino, part, *inner)) in visited:
            continue
        visited.add(visit)
        if part == "**":  # any number of folders: none, or one of these and any number again
            folders.append((parent, inner or ["*"]))
            inner = [part, *inner]
        ending = Path(part).suffix
        for path in paths:
            is_folder = path.is_dir()
            if not fnmatchcase(path.name, part) or (inner and not is_folder):
                continue
            if path.name.startswith(".") and not part.startswith("."):
                hidden.add(path)
            elif is_folder:
                # Links come last, so that a folder that is also reachable directly keeps that path.
                position = 0 if path.is_symlink() else len(folders)
                folders.insert(position, (path, inner or ["*"]))
            elif path.suffix.lower() in SUFFIXES or (ending and not has_magic(ending)):
                files.add(path)
            else:
                unknown.add(path)
    counts = [plural(len(hidden), "hidden file")] if hidden else []
    if unknown:
        endings = sorted({path.suffix or "none" for path in unknown})
        counts.append(f"{len(unknown):,} of unknown endings ({listed(endings)})")
    if counts:
        logger.info(f"{folder}: skipped {', '.join(counts)}")
    return sorted(files)


def read_audio(
    path: AudioFile, sample_rate: int = SAMPLE_RATE, downmixer: Downmixer | None = None
) -> Samples:
    """Read a file of any format and rate as (S,) int16.

    sample_rate: of the result, in Hz.
    downmixer: makes one channel; None: all channels are downmixed.

    Raises AudioError if the file is missing, truncated, damaged or not audio.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_wav(file := Path(folder, "tone.wav"), np.ones(8000, np.int16), 8_000)
    ...     read_audio(file, 16_000).shape
    (16000,)
    """
    content = bytearray()  # grows in place: a long file is in memory only once
    for block in stream_audio(path, sample_rate, downmixer=downmixer):
        _append(content, block, sample_rate)
    return np.frombuffer(content, np.int16)


def _append(content: bytearray, block: Samples, sample_rate: int) -> None:
    """Append a block, up to a day: kilobytes of AMR or FLAC may contain years of silence."""
    content += block.tobytes()
    if len(content) > 2 * MAX_CLIP_SECONDS * sample_rate:
        raise AudioError("longer than a day", "A clip may last a day. Name its spans in a table.")


def stream_audio(
    audio: AudioFile,
    sample_rate: int = SAMPLE_RATE,
    block_seconds: float = READ_BLOCK_SECONDS,
    *,
    downmixer: Downmixer | None = None,
    keep_truncated: bool = False,
) -> Iterator[Samples]:
    """Read like `read_audio`, and yield blocks (S,) of about ``block_seconds``.

    An open file is read from its start, and a pipe as it arrives.

    keep_truncated: whether a truncated file is read to its end instead of being refused.
    """
    file, _ = file_or_array(audio)
    options = ReadOptions(downmixer or Downmixer(), block_seconds, keep_truncated)
    blocks = resample_blocks(_blocks(file, options), to_rate(sample_rate))
    yield from map(to_int16, blocks)


def _blocks(audio: Path | str | BinaryIO, options: ReadOptions) -> Iterator[Block]:
    name = str(Path(audio)) if isinstance(audio, Path | str) else getattr(audio, "name", None)
    name = name if isinstance(name, str) else "the file"  # a temporary file is named by a number
    try:
        if isinstance(audio, Path | str) and not Path(audio).is_file():
            raise AudioError("missing", f"Audio file {name} does not exist or is not a file.")
        with _open(audio) as file:
            for block in decode.decode(file, name, options):
                options.downmixer.rate = block.rate
                yield block
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AudioError("unreachable", f"{name} cannot be read: {reason}") from error
    except decode.file_errors() as error:
        raise decode.not_audio(name) from error


def _open(audio: Path | str | BinaryIO) -> AbstractContextManager[BinaryIO]:
    """Open a file; a file that the caller opened stays open afterwards."""
    return Path(audio).open("rb") if isinstance(audio, Path | str) else nullcontext(audio)


def resample_blocks(blocks: Iterable[Block], new_rate: int) -> Iterator[Signal]:
    """Resample consecutive blocks, whose rate may change, and yield signals (S,).

    An AudioError of the blocks is raised after all the sound before it.
    """
    for rate, group in groupby(blocks, key=attrgetter("rate")):
        resampler = Resampler(rate, new_rate)
        damage: AudioError | None = None
        try:
            for block in group:
                yield resampler.push(block.samples)
        except AudioError as error:
            damage = error
        yield resampler.push(NO_SIGNAL, is_last=True)
        if damage is not None:
            raise damage


class Resampler:
    """Resample a signal whose blocks are pushed one after another.

    The output lags: by 21 ms in the median from 48 kHz to 16 kHz, by 64 ms from 8 kHz.

    >>> resampler = Resampler(48_000, 16_000)
    >>> first = resampler.push(np.zeros(4800, np.float32))
    >>> len(first) + len(resampler.push(NO_SIGNAL, is_last=True))
    1600
    """

    def __init__(self, rate: int, new_rate: int) -> None:
        self._stream = None
        if rate != new_rate:
            self._stream = soxr.ResampleStream(rate, new_rate, num_channels=1)

    def push(self, block: Signal, *, is_last: bool = False) -> Signal:
        """Return the samples that a block completes: (S,) -> (S',)."""
        if self._stream is None:
            return block
        resampled: Signal = self._stream.resample_chunk(np.ascontiguousarray(block), is_last)
        return resampled


def read_spans(
    spans: Sequence[AudioSpan],
    sample_rate: int,
    downmixer: Downmixer | None = None,
    audio: AudioFile | None = None,
) -> Iterator[Samples | AudioError]:
    """Read spans of one channel of a file, sorted by start, as slices of `read_audio`: (S,).

    The file is decoded once, up to the end of the last span. A span that cannot be read gives an
    error in its place; of a file that is damaged in the middle, the spans before it are read. A
    span that exceeds the file by a little, as `ends_early` says, ends with the file.

    audio: the open file; by default, the file at the path of the spans.
    """
    waiting = deque(spans)
    content = bytearray()  # of samples from index `first` on; grows and shrinks in place
    first = 0

    def to_bytes(time: int) -> int:
        return 2 * (microseconds_to_samples(time, sample_rate) - first)

    def cut(span: AudioSpan) -> Samples:
        end = None if span.end is None else to_bytes(span.end)
        return np.frombuffer(bytes(content[to_bytes(span.start) : end]), np.int16)

    try:
        for block in stream_audio(audio or spans[0].path, sample_rate, downmixer=downmixer):
            _append(content, block, sample_rate)
            while (end := waiting[0].end) is not None and to_bytes(end) <= len(content):
                yield cut(waiting.popleft())
                if not waiting:
                    return
            num_passed = min(to_bytes(waiting[0].start), len(content)) // 2
            del content[: 2 * num_passed]
            first += num_passed
    except AudioError as error:
        for span in waiting:  # a longer span may have kept others waiting
            is_read = span.end is not None and to_bytes(span.end) <= len(content)
            yield cut(span) if is_read else error
        return
    seconds = samples_to_seconds(first + len(content) // 2, sample_rate)
    for span in waiting:
        stop = seconds if span.end is None else span.end / MICROSECONDS
        is_inside = not ends_early(stop - span.start / MICROSECONDS, missing=stop - seconds)
        if is_inside and to_bytes(span.start) < len(content):
            yield cut(span)
        else:
            yield AudioError(
                BEYOND_END, f"{span}: the file {span.path} lasts only {seconds:.3f} s."
            )


def declared_seconds(audio: Path | str | BinaryIO) -> float:
    """Return the duration that a file declares, 0 if it cannot be read; for a progress bar."""
    if isinstance(audio, Path | str):
        if not os.path.isfile(audio):  # noqa: PTH113 - Path.is_file raises for too long a name
            return 0.0
        with suppress(soundfile.SoundFileError):  # in a hundredth of the time of FFmpeg
            return float(soundfile.info(audio).duration)
    with suppress(Exception), _open(audio) as file:  # a damaged file may make a library raise any
        return decode.declared_seconds(file)
    return 0.0


def file_rate(path: Path | str) -> int:
    """Return the sample rate of a file in Hz; raises AudioError like `read_audio`."""
    blocks = _blocks(path, ReadOptions(Downmixer(), block_seconds=0.1))
    return next(blocks).rate


def stream_input(
    audio: AudioLike,
    sample_rate: float | None,
    new_rate: int,
    downmixer: Downmixer | None = None,
    *,
    keep_truncated: bool = False,
) -> Iterator[Samples]:
    """Read a file, or convert an array, and yield it as blocks (S,) at ``new_rate``.

    audio: a path, an open file, an upload or the bytes of a file; an array or tensor at
        ``sample_rate``, or a pair of it and its rate; or audio of the libraries `datasets` and
        `transformers`: a mapping with `array` or `raw` and `sampling_rate`, or with `bytes` or
        `path`, or an AudioDecoder.
    """
    content, rate = file_or_array(audio, sample_rate)
    if rate is None:
        yield from stream_audio(
            content, new_rate, downmixer=downmixer, keep_truncated=keep_truncated
        )
        return
    downmixer = downmixer or Downmixer()
    mono = downmixer.downmix("the array", _to_channels(_to_numpy(content)), ())
    if not len(mono):
        raise AudioError("no samples", "The audio array is empty.")
    yield from map(to_int16, resample_blocks([Block(rate, mono)], new_rate))


def file_or_array(audio: Any, sample_rate: float | None = None) -> tuple[Any, int | None]:
    """Turn the audio that `stream_input` takes into a path, an open file, or an array and its rate.

    A path is a string; the rate of files is None.
    """
    read_samples = getattr(audio, "get_all_samples", None)  # of an AudioDecoder
    if read_samples is not None:
        decoded = read_samples()
        audio = (decoded.data, decoded.sample_rate)
    if isinstance(audio, Mapping):
        keys = [key for key in ("array", "raw") if audio.get(key) is not None]
        if keys:
            audio = (audio[keys[0]], audio.get("sampling_rate", sample_rate))
        elif files := [file for key in ("bytes", "path") if _is_given(file := audio.get(key))]:
            audio = files[0]
        else:
            names = ", ".join(map(str, audio)) or "nothing"
            expected = "`array`, `raw`, `bytes` or `path`"
            fault = f"A mapping must have {expected}, but this one has {names}."
            raise AudioError("not audio", fault)
    if isinstance(audio, tuple | list) and len(audio) == 2:
        # gradio gives the rate first.
        audio, sample_rate = audio[::-1] if isinstance(audio[0], Number) else audio
    rate = None if sample_rate is None else to_rate(sample_rate)
    is_array = isinstance(audio, np.ndarray) and rate is not None  # even of single bytes
    if not is_array and (file := path_or_file(audio)) is not None:
        return file, None
    if rate is None:
        fault = "An array needs `sample_rate` in Hz, or a pair (samples, rate)."
        raise AudioError("no sample rate", fault)
    return audio, rate


def path_or_file(audio: Any) -> str | BinaryIO | None:
    """Return the path or the open file that audio is given as; None if it is neither.

    Any buffer of single bytes is the content of a file. Raises AudioError if a file is closed, or
    is open for reading text.
    """
    if isinstance(audio, str | PathLike):
        return os.fsdecode(audio)
    with suppress(TypeError, ValueError, BufferError):  # it is no buffer
        if memoryview(audio).itemsize == 1:
            return io.BytesIO(audio)
    read = getattr(audio, "read", None)
    if read is None or iscoroutinefunction(read):  # of an upload to aiohttp or FastAPI
        audio = getattr(audio, "file", None)
    if not hasattr(audio, "read"):
        return None
    if hasattr(audio, "encoding"):
        fault = f"{audio} is open for reading text. Open it in mode rb."
        raise AudioError("not audio", fault)
    if getattr(audio, "closed", False) is True:
        raise AudioError("unreachable", f"{audio} is closed. Pass an open file, or its path.")
    with suppress(AttributeError, TypeError):  # a file may only seem to tell, as in a piped TAR
        if audio.seekable() or isinstance(audio, io.IOBase):
            return cast("BinaryIO", audio)
    return cast("BinaryIO", Pipe(audio.read))


def _is_given(value: Any) -> bool:
    """Return whether a value of a mapping is there, and is no empty buffer or path."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


class Pipe(io.RawIOBase):
    """A file that can only be read on, by a function that returns the next bytes."""

    def __init__(self, read: Callable[[int], bytes | bytearray]) -> None:
        self._read = read

    def read(self, size: int = -1, /) -> bytes:
        return bytes(self._read(size))

    def readable(self) -> bool:
        return True


def to_rate(sample_rate: float) -> int:
    """Return a sample rate in Hz, which may be a float or a number of NumPy, as an integer."""
    try:
        rate = int(sample_rate)
        is_whole = bool(rate == sample_rate)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        fault = f"`sample_rate` must be a whole number of Hz, but is {str(sample_rate)[:50]!r}."
        raise AudioError("not a sample rate", fault)
    check_rate("`sample_rate`", rate)
    return rate


def _to_numpy(array: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor as an array of NumPy, which has no bfloat16 and no gradients."""
    if hasattr(array, "detach"):
        tensor = array.detach().cpu()
        array = tensor.float() if tensor.is_floating_point() else tensor
    return np.asarray(array)


def to_samples(array: npt.NDArray[np.generic], *, is_live: bool = False) -> Samples:
    """Convert an array of audio to (S,) int16; every public function that takes samples calls this.

    array: int16, or floats between -1 and 1, or such a tensor, of shape (S,), (S, channels) as from
        soundfile, or (channels, S) as from torchaudio. Channels are averaged. There is one, or
        there are at most MAX_ARRAY_CHANNELS, and more samples than that.
    is_live: whether more follows. A clip of floats beyond 1 is scaled to 1, but this is cut.

    >>> to_samples(np.array([0.0, 0.5, -1.0]))
    array([     0,  16384, -32768], dtype=int16)
    """
    samples = _to_numpy(array)
    is_converted = samples.dtype == np.int16 and samples.ndim == 1
    return samples if is_converted else to_int16(_to_channels(samples, is_live).mean(axis=1))


def _to_channels(samples: npt.NDArray[np.generic], is_live: bool = False) -> Signal:
    """Check and scale an array as `to_samples` documents: -> (S, channels) between -1 and 1."""
    sides = sorted(samples.shape)
    is_mono = len(sides) == 1 or (len(sides) == 2 and sides[0] == 1)
    has_channels = len(sides) == 2 and 1 < sides[0] <= MAX_ARRAY_CHANNELS < sides[1]
    is_supported = samples.dtype == np.int16 or samples.dtype.kind == "f"
    if not is_supported or not (is_mono or has_channels):
        raise AudioError(
            "not audio",
            f"An audio array of {samples.dtype} with shape {samples.shape} is not supported. Pass "
            "int16, or floats between -1 and 1: (samples,), (samples, channels) or "
            f"(channels, samples), of at most {MAX_ARRAY_CHANNELS} channels and more samples "
            "than that.",
        )
    channels = np.atleast_2d(samples.T if len(samples) == sides[-1] else samples).T
    scale = FULL_SCALE if samples.dtype == np.int16 else 1
    floats = channels.astype(np.float32) / np.float32(scale)
    peak = check_values("the array", floats)
    if peak > 1 and is_live:
        note_once(f"note: the array {CUT_NOTE}.", key=CUT_NOTE, level=logging.WARNING)
    return floats if peak <= 1 or is_live else floats / np.float32(peak)


def to_int16(block: Signal) -> Samples:
    """Round samples between -1 and 1 to int16: (S,) -> (S,)."""
    scaled = np.rint(block * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def encode_audio(samples: Samples, sample_rate: int, format: str, **options: Any) -> bytes:
    """Return samples (S,) as a file of a format of libsndfile, such as WAV or FLAC."""
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate, format=format, **options)
    return content.getvalue()


def encode_mp3(samples: Samples, sample_rate: int) -> bytes:
    """Return samples (S,) at one of `MP3_RATES` as MP3."""
    return encode_audio(samples, sample_rate, "MP3", compression_level=MP3_COMPRESSION)


def write_wav(file: Path | str, samples: Samples, sample_rate: int) -> None:
    """Write samples (S,) as WAV, atomically; to standard output if the file is `-`."""
    wav = encode_audio(samples, to_rate(sample_rate), "WAV")
    if Path(file) == STANDARD:
        sys.stdout.buffer.write(wav)
    else:
        write_bytes_atomically(Path(file), wav)

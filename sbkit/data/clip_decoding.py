"""Decode clips, encode them for a store, and hash their file in the same read.

audio file -> samples (S,) -> bytes of a WAV or FLAC
"""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec

from sbkit.audio.channels import Downmixer
from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioSpan, Samples, encode_audio, read_audio, read_spans
from sbkit.data.filesystem import access_errors

STORE_FORMATS: Mapping[str, Mapping[str, Any]] = {  # options of libsndfile
    "pcm": {"format": "WAV"},
    # The fastest compression; the highest takes four times as long and saves 3 %.
    "flac": {"format": "FLAC", "compression_level": 0.0},
}
DIGEST_BYTES = 16
READ_BYTES = 1 << 20  # at a time


class HashedFile(io.RawIOBase):
    """A file that is hashed while a decoder reads it.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     num_written = file.write(b"RIFF")
    ...     HashedFile(file, "a.wav").finish()
    'f9d45a7be062711cbb5ca8c8e2699db2'
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.name = name  # errors show it
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._num_hashed = 0

    def readinto(self, buffer: Any) -> int:
        start = self._file.tell()
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        if start <= self._num_hashed < start + len(content):
            self._hash.update(content[self._num_hashed - start :])
            self._num_hashed = start + len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def finish(self) -> str:
        """Return the hash of the whole file, after reading the part that is still unread."""
        self._file.seek(self._num_hashed)
        while content := self._file.read(READ_BYTES):
            self._hash.update(content)
            self._num_hashed += len(content)
        return self._hash.hexdigest()


@dataclass
class DecodedFile:
    """Facts about a file, set once all of its clips are decoded."""

    digest: str = ""  # a hash of its content
    channel_fault: str = ""  # a description of audio that the downmix of its channels loses


class DecodedClip(NamedTuple):
    """A clip encoded for a store."""

    audio: bytes | AudioError  # an error if it cannot be decoded
    samples: int = 0


def decode_file(
    clips: Sequence[AudioSpan],
    sample_rate: int,
    store: str,
    result: DecodedFile,
    content: bytes | None = None,
) -> Iterator[DecodedClip]:
    """Decode clips of one file and one channel, sorted by start; the file is read once.

    result: its fields are set after the last clip.
    content: of the file, if it is inside another file.
    """
    path, downmixer = clips[0].path, Downmixer(clips[0].channel)
    try:
        with _open(path, content) as file:
            hashed = HashedFile(file, path)
            source = io.BufferedReader(hashed, READ_BYTES)
            if len(clips) == 1 and clips[0].is_whole:
                decoded: Iterable[Samples | AudioError] = [
                    read_audio(source, sample_rate, downmixer)
                ]
            else:
                decoded = read_spans(clips, sample_rate, downmixer, source)
            for samples in decoded:
                yield _encode(samples, sample_rate, store)
            result.digest, result.channel_fault = hashed.finish(), downmixer.fault
    except AudioError as error:
        yield from [DecodedClip(error)] * len(clips)
    except OSError as error:
        fault = AudioError("unreachable", f"{path} cannot be read: {error}.")
        yield from [DecodedClip(fault)] * len(clips)


def _open(path: str, content: bytes | None) -> AbstractContextManager[BinaryIO]:
    if content is not None:
        return io.BytesIO(content)
    if "://" in path:
        with access_errors(path):
            opened: BinaryIO = fsspec.open(path, "rb").open()
        return opened
    if not Path(path).is_file():
        raise AudioError("missing", f"Audio file {path} does not exist or is not a file.")
    return Path(path).open("rb")


def _encode(samples: Samples | AudioError, sample_rate: int, store: str) -> DecodedClip:
    if isinstance(samples, AudioError):
        return DecodedClip(samples)
    return DecodedClip(encode_audio(samples, sample_rate, **STORE_FORMATS[store]), len(samples))


def order_by_file(spans: Iterable[AudioSpan]) -> list[int]:
    """Return the order of spans by file, channel and start; files stay in order of appearance."""
    position_of: dict[str, int] = {}
    keys = [
        (position_of.setdefault(span.path, len(position_of)), span.channel or 0, span.start)
        for span in spans
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)

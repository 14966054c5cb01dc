"""Hash a file, decode its clips and encode them for a store.

audio file -> samples (S,) -> bytes of a WAV or FLAC
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase, BytesIO, FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, cast

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


@dataclass
class DecodedFile:
    """Facts about a file, set once all of its clips are decoded."""

    digest: str = ""  # a hash of its content
    rate: int = 0  # Hz
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
            new_hash = partial(hashlib.blake2b, digest_size=DIGEST_BYTES)
            digest = hashlib.file_digest(file, new_hash).hexdigest()
            if len(clips) == 1 and clips[0].is_whole:
                decoded: Iterable[Samples | AudioError] = [read_audio(file, sample_rate, downmixer)]
            else:
                decoded = read_spans(clips, sample_rate, downmixer, file)
            for samples in decoded:
                yield _encode(samples, sample_rate, store)
            result.digest, result.rate = digest, downmixer.rate
            result.channel_fault = downmixer.fault
    except AudioError as error:
        yield from [DecodedClip(error)] * len(clips)
    except OSError as error:
        fault = AudioError("unreachable", f"{path} cannot be read: {error}.")
        yield from [DecodedClip(fault)] * len(clips)


@contextmanager
def _open(path: str, content: bytes | None) -> Iterator[BufferedIOBase]:
    """Open a file, which can be read twice; errors show its `name`, the path."""
    if content is not None:
        file = BytesIO(content)
        file.name = path
        yield file
    elif "://" in path:
        # Copied to the disk: it is read once from there, and it may be longer than the memory.
        with TemporaryFile() as copy:
            with access_errors(path), fsspec.open(path, "rb") as remote:
                shutil.copyfileobj(remote, copy)
            cast("FileIO", copy.raw).name = path
            copy.seek(0)
            yield copy
    elif Path(path).is_file():
        with Path(path).open("rb") as local:
            yield local
    else:
        raise AudioError("missing", f"Audio file {path} does not exist or is not a file.")


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

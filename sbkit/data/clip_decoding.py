"""Clips, decoded on all cores into the form of a store.

audio file -> samples (S,) -> bytes of a WAV or FLAC
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.audio.channels import ChannelMixer
from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioPart, Samples, encode_audio, read_audio, read_parts
from sbkit.base.content_cache import file_digest
from sbkit.base.errors import DataError
from sbkit.base.machine import usable_cores
from sbkit.base.process import begin_work

STORE_FORMATS: Mapping[str, Mapping[str, Any]] = {  # options of libsndfile
    "pcm": {"format": "WAV"},
    # The fastest compression; the highest takes four times as long and saves 3 %.
    "flac": {"format": "FLAC", "compression_level": 0.0},
}
MIN_CLIPS_FOR_PROCESSES = 500  # starting a process takes as long as decoding 200 clips
MAX_PROCESSES = 64  # each takes 0.1 GB
CLIPS_AHEAD = 8  # how many decoded clips may wait to be written, per process


class DecodedClip(NamedTuple):
    """A clip in the form of a store."""

    audio: bytes | AudioError  # the error says why it cannot be decoded
    samples: int = 0
    digest: str = ""  # a hash of its file, and its position in it
    mix_fault: str = ""  # what the mix of its file's channels loses


_Submit = Callable[..., Callable[[], DecodedClip]]  # of a function that makes a clip


def decode_clips(
    parts: Sequence[AudioPart], sample_rate: int, *, store: str = "pcm"
) -> Iterator[DecodedClip]:
    """Decode clips in order into the form of a store, many of them on all cores.

    Parts of one file that follow each other, sorted by start, are cut from one stream.
    """
    processes = min(usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MAX_PROCESSES)
    if processes < 2 or len(parts) < MIN_CLIPS_FOR_PROCESSES:
        for finish in _submit_clips(partial, parts, sample_rate, store):
            yield finish()
        return
    # Not threads: PyAV holds Python's lock between packets, and two threads decode no faster than
    # one. Not multiprocessing's pool: it would import the main module of the program again.
    from loky import get_reusable_executor
    from loky.process_executor import BrokenProcessPool

    executor = get_reusable_executor(processes, initializer=begin_work, initargs=(os.getpid(),))
    ahead: deque[Callable[[], DecodedClip]] = deque()
    try:
        calls = _submit_clips(
            lambda *call: executor.submit(*call).result, parts, sample_rate, store
        )
        while True:
            ahead.extend(islice(calls, CLIPS_AHEAD * processes - len(ahead)))
            if not ahead:
                return
            yield ahead.popleft()()
    except BrokenProcessPool as error:
        raise DataError(
            f"One of the {processes} processes that decode audio was killed, perhaps because "
            "memory ran out."
        ) from error


def _submit_clips(
    submit: _Submit, parts: Iterable[AudioPart], sample_rate: int, store: str
) -> Iterator[Callable[[], DecodedClip]]:
    """Submit whole files to be decoded, and parts, which are read here, to be encoded."""
    for (name, channel), group in groupby(parts, key=lambda part: (part.path, part.channel)):
        path = Path(name)
        clips = list(group)
        if all(part.is_whole for part in clips):
            for part in clips:
                yield submit(_decode_clip, part, sample_rate, store)
            continue
        digest = ""
        mixer = ChannelMixer(channel)
        for part, samples in zip(clips, read_parts(clips, sample_rate, mixer), strict=True):
            if isinstance(samples, AudioError):
                yield partial(DecodedClip, samples)
                continue
            digest = digest or _hash_file(path)
            id = clip_digest(digest, part)
            yield submit(_encode_clip, samples, id, mixer.fault, sample_rate, store)


def _decode_clip(part: AudioPart, sample_rate: int, store: str) -> DecodedClip:
    mixer = ChannelMixer(part.channel)
    try:
        samples = read_audio(part.path, sample_rate, mixer)
        digest = clip_digest(_hash_file(Path(part.path)), part)
    except AudioError as error:
        return DecodedClip(error)
    return _encode_clip(samples, digest, mixer.fault, sample_rate, store)


def _encode_clip(
    samples: Samples, digest: str, mix_fault: str, sample_rate: int, store: str
) -> DecodedClip:
    audio = encode_audio(samples, sample_rate, **STORE_FORMATS[store])
    return DecodedClip(audio, len(samples), digest, mix_fault)


def clip_digest(digest: str, part: AudioPart) -> str:
    """Return the digest of a clip, from that of its file."""
    return digest if part.is_file else f"{digest}:{part[1:]}"


def _hash_file(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise AudioError("unreachable", f"{path} cannot be read: {error}.") from error


def by_file(parts: Iterable[AudioPart]) -> list[int]:
    """Return the indices of parts by file, in the order of first parts, channel and start."""
    rank_of: dict[str, int] = {}
    keys = [
        (rank_of.setdefault(part.path, len(rank_of)), part.channel or 0, part.start)
        for part in parts
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)

"""Whether an audio file holds all that its header declares.

libsndfile reads a file that was cut short up to its end, and for most formats at most logs that
the header declared more. What is decoded here is what the format itself says of its length.
"""

import re
from mmap import ACCESS_READ, mmap
from pathlib import Path

from soundfile import SoundFile

MP3_PADDING = 2 * 1152  # samples: an encoder's delay and its last, partly filled frame
STREAMED = 0x7FFF_0000  # a length at or above this was unknown to the program that wrote it
UNKNOWN = 1 << 40  # frames; at 768 kHz more than two weeks, and so no length at all
RF64_HEADER = 80  # bytes, the shortest: riff 12, ds64 36, fmt 24, data 8
LONGEST_OGG_PAGE = 65_307  # bytes (RFC 3533)

# Where recordings begin: a FLAC, with the size of its first block; an MP3, at a frame whose tag has
# the number of frames; in Ogg a page that is marked as a first one, behind a page that is not.
_BEGIN = {
    "FLAC": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    "MP3": re.compile(rb"\xff[\xe0-\xff](?s:.{11}|.{19}|.{34})(?:Xing|Info)"),
}
_OGG_PAGE = re.compile(rb"OggS\x00[\x00\x01\x04\x05]")
_OGG_FIRST_PAGE = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")

# Formats of which half a file may look like a whole one: their header declares no length, or in a
# way of its own, and no corpus of speech is kept in them.
UNCHECKED = frozenset({"AVR", "IRCAM", "MAT4", "MAT5", "MPC2K", "PAF", "PVF", "SDS", "WVE", "XI"})

# "<name> : <declared bytes> (should be <bytes that are there>)", for chunks that hold audio.
_CHUNK = re.compile(
    r"^ *(?:data|SSND|BODY|riff|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE
)
_RF64_FRAMES = re.compile(r"does not match value from 'ds64' chunk of (\d+)")


def is_truncated(path: Path, file: SoundFile, frames_read: int) -> bool:
    """Return whether a file, read to its end, lacks some of what its header declares."""
    padding = MP3_PADDING if file.format == "MP3" else 0
    if frames_read + padding < file.frames < UNKNOWN:
        return True
    log = file.extra_info
    return (
        any(int(there) < int(declared) < STREAMED for declared, there in _CHUNK.findall(log))
        or ("seems to be truncated" in log and file.subtype != "GSM610")  # said of odd lengths
        or "Seems to be a truncated file" in log
        or (file.format == "OGG" and _ogg_is_truncated(path))
        or (file.format == "NIST" and _nist_is_truncated(path))
        or (file.format == "RF64" and _rf64_is_truncated(path, file.frames, log))
    )


def holds_several(path: Path, kind: str) -> bool:
    """Return whether recordings were joined byte by byte: libsndfile reads the first in silence.

    Of wav and AIFF it refuses such files itself.
    """
    if kind not in ("OGG", *_BEGIN):
        return False
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if kind in _BEGIN:
            return len(_BEGIN[kind].findall(content)) > 1
        page = _OGG_PAGE.search(content)
        return page is not None and _OGG_FIRST_PAGE.search(content, page.start()) is not None


def _ogg_is_truncated(path: Path) -> bool:
    """Return whether the last ogg page is incomplete: libsndfile drops such a page in silence.

    A page is a header of 27 bytes, the last of which counts its segments, a table with the size of
    each, and their bytes (RFC 3533).
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * LONGEST_OGG_PAGE))
        tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27 or len(page) < 27 + page[26]:
        return True
    return len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])


def _nist_is_truncated(path: Path) -> bool:
    """Compare a NIST/SPHERE header with the file's size.

    The header is text: "NIST_1A", its own size in bytes, then a line "name -type value" per field.
    """
    with path.open("rb") as file:
        header = file.read(1024).decode("latin-1")
    size = int(header.split("\n")[1])
    fields = dict(re.findall(r"^(\w+) -\w+ (\S+)", header, re.MULTILINE))
    names = ("sample_count", "channel_count", "sample_n_bytes")
    count, channels, width = (int(fields.get(name, 1)) for name in names)
    return path.stat().st_size < size + count * channels * width


def _rf64_is_truncated(path: Path, frames: int, log: str) -> bool:
    """Compare the frames and the bytes that the header declares with those that are there."""
    declared = _RF64_FRAMES.findall(log)
    if declared and frames < int(declared[-1]) < UNKNOWN:
        return True
    size = re.search(r"^ *Data size *: (\d+)", log, re.MULTILINE)
    return size is not None and path.stat().st_size - RF64_HEADER < int(size[1]) < UNKNOWN

"""Headers of audio files: what they declare, compared with what the file holds.

FFmpeg reads a truncated WAV, W64 or CAF to its end and reports the shorter duration as declared. It
reads only the first of joined files of these formats, of AIFF and of MP4. All consist of chunks.
Of joined FLACs it loses the frame at the seam.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from sbkit.base.errors import DataError

PCM_TAGS = (1, 3)  # of WAV: integers, floats
EXTENSIBLE_TAG = 0xFFFE  # of WAV: the tag stands in another field
STREAMED_BYTES = 2_000_000_000  # programs that write into a pipe declare this size or more
MAX_EXCESS_BYTES = 64  # some programs count the header as audio
# Bytes behind the audio that are no chunk: recorders fill the last block of a disk. If there are
# more, and more than a share of the audio, its declared size is an old one, or counts samples.
MAX_STRAY_BYTES, MAX_STRAY_SHARE = 4096, 0.01
# Chunks that may follow the sound; some programs write a wrong size, or only a part of the last.
TRAILING_CHUNKS = (
    *(b"list", b"id3", b"bext", b"ixml", b"_pmx", b"cue", b"smpl", b"junk", b"pad", b"fact"),
    b"peak",
)
_TEXT = re.compile(  # the start of XML or JSON, also in UTF-16
    rb"(?i)[\s\0]*(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\s\0]*(?:<\0?[a-z?!]|\{[\s\0]*\")"
)
TAG_PREFIXES = (b"ID3", b"TAG", b"APETAGEX")  # of tags that follow the sound, also in joined MP3s
UNKNOWN_32_BITS = 0xFFFFFFFF  # of RF64: the size stands in the chunk ds64
# What may be missing at the end of a file or a span, because recorders and tables round: seconds,
# or if it is more, a share of its declared length, up to a maximum.
MISSING_SECONDS, MISSING_SHARE, MAX_MISSING_SECONDS = 0.1, 0.01, 1.0
MAX_CHUNKS = 100_000  # fragments of one second in an MP4 of half a day
ID3_HEADER_BYTES = 10
MAX_FRAME_BYTES = 2881  # of MPEG audio
# The first frame of an MP3 may hold no sound, but the length of the file. The tag's position in it
# depends on version and channels; the lowest bit of its flags says whether it tells the length.
_LENGTH_TAG = re.compile(
    rb"\xff[\xe2-\xff]..(?:.{9}|.{17}|.{32})"
    rb"(?:(?:Xing|Info)\0\0\0[^\0\2\4\6\x08\n\x0c\x0e]|VBRI.{10})(....)",
    re.DOTALL,
)
_FLAC_START = re.compile(rb"fLaC[\0\x80]\0\0\x22")  # its marker, and the header of its first block
FLAC_START_BYTES = 8
FLAC_FRAMES = (b"\xff\xf8", b"\xff\xf9")  # the start of each frame
MAX_FLAC_BLOCKS = 32  # before the frames: tags, pictures, padding
SCANNED_BYTES = 1 << 20  # at a time
_SAMPLE_COUNT = re.compile(rb"stsz.{8}(.{4})|trun.{4}(.{4})", re.DOTALL)  # in tables of an MP4


class AudioError(DataError):
    """Raised for an audio file that cannot be read."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # a category for counting: "missing", "no samples" ...

    def __reduce__(self) -> tuple[type["AudioError"], tuple[str, str]]:
        return type(self), (self.reason, str(self))


def cut_short(name: str, declared: float = 0.0, seconds: float = 0.0) -> AudioError:
    """Return the error of a file that ends early, with its lengths in seconds if they are known."""
    fault = "is truncated or damaged"
    if declared:
        fault = f"is truncated: it declares {declared:.1f} s, has {seconds:.1f} s"
    return AudioError("cut short or damaged", f"{name} {fault}.")


def ends_early(declared: float, missing: float) -> bool:
    """Check whether too many seconds are missing of those that a file or a span declares."""
    limit = max(MISSING_SECONDS, min(MISSING_SHARE * declared, MAX_MISSING_SECONDS))
    return round(missing - limit, 6) > 0  # microseconds: at the limit, floats differ


class ChunkFormat(NamedTuple):
    """How a container stores its chunks: each an id, a size and its bytes."""

    first: int  # position of the first chunk
    header: struct.Struct  # of a chunk: its id (bytes) and its size
    audio: tuple[bytes, ...]  # ids of chunks that must be complete
    counts_header: bool = False  # whether the size includes the header
    alignment: int = 1  # of chunks, in bytes


MP4_AUDIO, MP4_FRAGMENT = b"mdat", b"moof"
W64_AUDIO = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0O\x8e\xdb\x8a"
CHUNK_FORMATS = {  # by the first bytes; a dot stands for any byte
    rb"(?:RIFF|RF64|BW64)....WAVE": ChunkFormat(12, struct.Struct("<4sI"), (b"data",), alignment=2),
    rb"RIFX....WAVE": ChunkFormat(12, struct.Struct(">4sI"), (b"data",), alignment=2),
    rb"FORM....AIF[FC]": ChunkFormat(12, struct.Struct(">4sI"), (b"SSND",), alignment=2),
    rb"riff": ChunkFormat(40, struct.Struct("<16sQ"), (W64_AUDIO,), True, 8),
    rb"caff": ChunkFormat(8, struct.Struct(">4sq"), (b"data",)),
    rb"....ftyp": ChunkFormat(
        0, struct.Struct(">I4s"), (b"moov", MP4_FRAGMENT, MP4_AUDIO), counts_header=True
    ),
}


class Header(NamedTuple):
    """What the header of a file declares."""

    is_pcm_wav: bool = False  # one or two channels
    # Declared bytes of audio as a multiple of those in the file; 1 if they are equal or not
    # compared, 0 if the file was streamed and declares nothing.
    declared_share: float = 1.0
    is_chunked: bool = False  # one of CHUNK_FORMATS
    stray_bytes: int = 0  # behind the declared end of the audio, as if it went on
    end: int | None = None  # of the whole fragments of an MP4, if the table of the next is cut
    mp3_frames: int = 0  # the length that an MP3 declares, 0 if it declares none
    flac_bounds: Sequence[int] = ()  # the starts of FLACs that were joined, and their end


def read_header(file: BinaryIO, name: str) -> Header:
    """Read the header of an open file; raises AudioError for joined files and broken chunks."""
    start = file.read(ID3_HEADER_BYTES + MAX_FRAME_BYTES)
    for pattern, chunk_format in CHUNK_FORMATS.items():
        if re.match(pattern, start, re.DOTALL):
            try:
                return _read_chunks(file, name, chunk_format, start)
            except (struct.error, OverflowError) as error:  # sizes that cannot be true
                raise cut_short(name) from error
    if start.startswith(b"ID3"):  # its size has 7 bits in each of the last four bytes
        size = sum(byte << shift for byte, shift in zip(start[6:10], (21, 14, 7, 0), strict=False))
        file.seek(ID3_HEADER_BYTES + size)
        start = file.read(MAX_FRAME_BYTES)
    if start.startswith(b"fLaC"):
        return Header(flac_bounds=_flac_bounds(file))
    tag = _LENGTH_TAG.search(start)
    return Header(mp3_frames=int.from_bytes(tag[1], "big") if tag else 0)


def _flac_bounds(file: BinaryIO) -> Sequence[int]:
    """Return the starts of the FLACs that a file was joined of, and its end; [] if it has one."""
    starts: list[int] = []
    frames = 0  # where the frames of the latest FLAC begin
    content = b""
    file_bytes = file.seek(0)
    while block := file.read(SCANNED_BYTES):
        content = content[1 - FLAC_START_BYTES :] + block  # a start may lie across two blocks
        file_bytes += len(block)
        for match in _FLAC_START.finditer(content):
            start = file_bytes - len(content) + match.start()
            if start >= frames and (first_frame := _first_flac_frame(file, start)):
                starts.append(start)
                frames = first_frame
        file.seek(file_bytes)
    return [*starts, file_bytes] if len(starts) > 1 else []


def _first_flac_frame(file: BinaryIO, start: int) -> int:
    """Return the position of the first frame of the FLAC at ``start``, 0 if none starts there.

    The bytes of its marker may also occur within a frame or a picture.
    """
    position = start + len(b"fLaC")
    for _ in range(MAX_FLAC_BLOCKS):
        file.seek(position)
        header = file.read(4)
        if not header:
            break
        position += len(header) + int.from_bytes(header[1:], "big")
        if header >= b"\x80":  # the last block
            file.seek(position)
            return position if file.read(2) in FLAC_FRAMES else 0
    return 0


def _read_chunks(file: BinaryIO, name: str, chunk_format: ChunkFormat, start: bytes) -> Header:
    file_bytes = file.seek(0, 2)
    first_id, _ = _unpack(chunk_format, start)
    is_mp4 = MP4_AUDIO in chunk_format.audio
    is_pcm_wav = is_sound_found = False
    long_size = 0  # of the audio in an RF64
    num_samples = 0  # in the tables of an MP4
    stray_bytes = 0
    for index, (id, position, size) in enumerate(_walk(file, chunk_format)):
        present = file_bytes - position
        if index and id == first_id:
            fault = f"{name} is several files that were joined byte by byte. Split it."
            raise AudioError("joined files", fault)
        if id == b"fmt ":
            is_riff = start[:4] in (b"RIFF", b"RIFX")  # libsndfile does not read BW64
            fields = file.read(26)
            is_pcm_wav = is_riff and _is_pcm(fields, chunk_format.header.format[0])
        elif id == b"ds64":
            long_size = int.from_bytes(file.read(16)[8:], "little")
        elif id in chunk_format.audio:
            is_pcm_wav &= not is_sound_found
            is_sound_found = True
            size = long_size if long_size and size == UNKNOWN_32_BITS else size
            if id == MP4_AUDIO and size > present:
                return Header(is_chunked=True)  # FFmpeg knows how long it should be
            if id == MP4_FRAGMENT and size > present:
                return Header(is_chunked=True, end=position - chunk_format.header.size)
            is_streamed = size == 0 or present < size >= STREAMED_BYTES
            if not is_mp4 and (is_streamed or size > present + MAX_EXCESS_BYTES):
                share = 0.0 if is_streamed else size / max(present, 1)
                return Header(declared_share=share, is_chunked=True)
            if id != MP4_AUDIO and is_mp4:
                counts = (match[1] or match[2] for match in _SAMPLE_COUNT.finditer(file.read(size)))
                num_samples += sum(int.from_bytes(count, "big") for count in counts)
            if not is_mp4:
                stray_bytes = _count_stray_bytes(file, chunk_format, position + size, size)
        is_needed = not is_sound_found or (is_mp4 and id in chunk_format.audio)
        if (size > present and is_needed) or num_samples > file_bytes:
            raise cut_short(name)  # FFmpeg would allocate what is declared: 24 bytes a sample
    return Header(is_pcm_wav, is_chunked=True, stray_bytes=stray_bytes)


def _count_stray_bytes(file: BinaryIO, chunk_format: ChunkFormat, end: int, size: int) -> int:
    """Count the bytes behind audio of a size; 0 for a few, padding, tags, XML, JSON and chunks.

    A chunk may follow without the byte that aligns it, or after several zeros.
    """
    count = file.seek(0, 2) - end
    if count <= max(MAX_STRAY_BYTES, MAX_STRAY_SHARE * size):
        return 0
    file.seek(end)
    content = file.read(SCANNED_BYTES)
    unpadded = content.lstrip(b"\0")
    for chunk in (unpadded, content[-size % chunk_format.alignment :]):
        id, chunk_size = _unpack(chunk_format, chunk.ljust(chunk_format.header.size, b"\0"))
        is_name = id[:4].isascii() and id[:4].decode().isprintable()
        if (is_name and chunk_size <= count) or id[:4].rstrip().lower() in TRAILING_CHUNKS:
            return 0
    is_padding = not content.strip(content[:1])
    return 0 if is_padding or unpadded.startswith(TAG_PREFIXES) or _TEXT.match(content) else count


def _walk(file: BinaryIO, chunk_format: ChunkFormat) -> Iterator[tuple[bytes, int, int]]:
    """Yield the id, the start and the size of the chunks, while the file stands at their start."""
    position = chunk_format.first
    header_bytes = chunk_format.header.size
    for _ in range(MAX_CHUNKS):
        file.seek(position)
        header = file.read(header_bytes)
        if len(header) < header_bytes:
            return
        id, size = _unpack(chunk_format, header)
        if chunk_format.counts_header:
            if size == 1:  # of an MP4: eight more bytes hold the size
                size = int.from_bytes(file.read(8), "big")
            size -= header_bytes
        if size < 0:  # unknown, to the end of the file
            return
        start = position + header_bytes
        yield id, start, size
        position = start + size + -size % chunk_format.alignment


def _unpack(chunk_format: ChunkFormat, header: bytes) -> tuple[bytes, int]:
    """Return the id and the size of a chunk; MP4 has them in the other order."""
    first, second = chunk_format.header.unpack_from(header)
    return (first, second) if isinstance(first, bytes) else (second, first)


def _is_pcm(fields: bytes, byte_order: str) -> bool:
    """Check whether the chunk "fmt " of a WAV declares one or two channels of PCM."""
    tag, channels, _, _, _, bits = struct.unpack_from(f"{byte_order}HHIIHH", fields)
    if tag == EXTENSIBLE_TAG:
        (tag,) = struct.unpack(f"{byte_order}H", fields[24:26])
    return tag in PCM_TAGS and channels in (1, 2) and 8 <= bits <= 64 >> (tag == PCM_TAGS[0])

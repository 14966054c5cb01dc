"""The codes of a codec: their sizes, checks of indices, and files of codes, without torch.

An index out of range reads past the end of a table, which kills the process on a GPU; a clamped one
silently decodes to a wrong sound. So indices are checked on the CPU.

Legend: U frames of codes, G codebooks.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbkit.base.arrays import Int64s
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import read_regular, write_bytes_atomically

Codes = Int64s  # (U, G)

MAGIC = b"sbkit codes 1\n\0\0"
HEADER = struct.Struct("<16s32sQ")  # magic, hash of the code space, samples
MAX_CODES_BYTES = 1 << 32  # eight months of codes


@dataclass(frozen=True)
class CodeSpace:
    """Frames have ``groups`` codes; a codebook has a code for each combination of ``levels``.

    >>> space = CodeSpace(groups=4, levels=(8, 5, 5, 5))
    >>> space.size, space.bits
    (1000, 10)
    """

    groups: int
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.groups < 1 or not self.levels or min(self.levels) < 2:
            raise ConfigError(
                f"A quantizer needs groups of levels of at least 2, such as 4 of [8, 5, 5, 5], but "
                f"has {self.groups} of {[*self.levels]}."
            )

    @property
    def size(self) -> int:
        return math.prod(self.levels)

    @property
    def bits(self) -> int:
        return (self.size - 1).bit_length()

    def check_head(self, name: str, outputs: int) -> None:
        """Raise ConfigError unless a head that predicts codes has one output for each."""
        if outputs != self.size:
            raise ConfigError(
                f"`{name}` has {outputs} outputs for {self.size} codes.", keys=(name,)
            )

    def check(self, codes: npt.ArrayLike, *, subject: str) -> Codes:
        """Return codes (U, G) as int64; raises DataError, which names ``subject``, for others."""
        array = np.asarray(codes)
        has_groups = array.ndim == 2 and array.shape[1] == self.groups
        if array.dtype.kind not in "iu" or not has_groups or not len(array):
            raise DataError(
                f"Codes must be integers of shape (frames, {self.groups}), but {subject} has "
                f"{array.dtype} of shape {array.shape}."
            )
        invalid = np.argwhere((array < 0) | (array >= self.size))
        if len(invalid):
            frame, group = invalid[0].tolist()
            raise DataError(
                f"Codes must be from 0 to {self.size - 1}, but {subject} has {array[frame, group]} "
                f"in frame {frame}, codebook {group}."
            )
        return array.astype(np.int64)

    def fingerprint(self, **more: object) -> bytes:
        """Return the hash for the header of files of codes; ``more`` distinguishes codecs."""
        settings = {"groups": self.groups, "levels": self.levels, **more}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()


@dataclass(frozen=True, eq=False)
class EncodedAudio:
    """Codes (U, G), and the number of samples that they encode."""

    codes: Codes
    samples: int


def write_codes(file: Path, coded: EncodedAudio, space: CodeSpace, fingerprint: bytes) -> None:
    """Write the header, then the codes frame by frame, each in as few bits as hold any code."""
    bits = coded.codes[..., None] >> np.arange(space.bits)[::-1] & 1  # (U, G, bits), highest first
    packed = np.packbits(bits.astype(np.uint8)).tobytes()
    write_bytes_atomically(file, HEADER.pack(MAGIC, fingerprint, coded.samples) + packed)


def read_codes(file: Path, space: CodeSpace, fingerprint: bytes, *, frame: int) -> EncodedAudio:
    """Read a file of `write_codes`; ``frame``: samples of a frame."""
    content = read_regular(file, max_bytes=MAX_CODES_BYTES, subject="A file of codes")
    magic, codec, samples = HEADER.unpack(content[: HEADER.size].ljust(HEADER.size, b"\0"))
    if magic != MAGIC or codec != fingerprint:
        problem = "is of another codec" if magic == MAGIC else "is not a file of codes"
        raise DataError(f"{file} {problem}. Decode it with the bundle that encoded it.")
    shape = (-(-samples // frame), space.groups, space.bits)
    packed = np.frombuffer(content[HEADER.size :], np.uint8)
    count = math.prod(shape)
    if len(packed) != -(-count // 8):
        raise DataError(
            f"{file} is truncated or changed: it has {len(packed)} bytes, not {-(-count // 8)}."
        )
    bits = np.unpackbits(packed, count=count).reshape(shape).astype(np.int64)
    codes = bits @ (1 << np.arange(space.bits)[::-1])
    return EncodedAudio(space.check(codes, subject=str(file)), samples)

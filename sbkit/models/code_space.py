"""The space of codes: where every size comes from, and what every index passes before it is used.

Out of its range, a table is read past its end, which ends the process on a GPU, and arithmetic
makes a wrong sound in silence. So indices are checked on the CPU, and none is clamped: that would
make a sound of a wrong index, too.

Legend: U frames of codes, G codebooks.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, write_bytes_atomically

Codes = npt.NDArray[np.int64]  # (U, G)

MAGIC = b"sbkit codes 1\n\0\0"
HEADER = struct.Struct("<16s32sQ")  # magic, hash of the code space, samples
LARGEST = 1 << 32  # bytes of a file of codes: eight months


@dataclass(frozen=True)
class CodeSpace:
    """For each frame ``groups`` codes, and in each as many codes as ``levels`` have combinations.

    Raises SbkitError for sizes that are none.
    """

    groups: int
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what has no codes."""
        if self.groups < 1 or not self.levels or min(self.levels) < 2:
            raise SbkitError(
                "A code space must have at least one codebook, and levels of at least 2, such as 4 "
                f"of [8, 5, 5, 5], but has {self.groups} of {[*self.levels]}. Correct it."
            )

    @property
    def size(self) -> int:
        """Count the codes of a codebook."""
        return math.prod(self.levels)

    @property
    def bits(self) -> int:
        """Count the bits that hold a code."""
        return (self.size - 1).bit_length()

    def check_head(self, name: str, outputs: int) -> None:
        """Raise SbkitError for a head that predicts codes, and has not one class for each."""
        if outputs != self.size:
            raise SbkitError(
                f"`{name}` must have as many outputs as there are codes ({self.size}), but has "
                f"{outputs}. Set its out_features to {self.size}; special ids are no codes, and "
                "have a head of their own."
            )

    def check(self, codes: Any, *, of: str) -> Codes:
        """Return codes (U, G) as they are, of whole numbers in the range of the space.

        Raises SbkitError for any other type, shape or value; ``of`` names them.
        """
        found = np.asarray(codes)
        fits = found.dtype.kind in "iu" and found.ndim == 2 and found.shape[1] == self.groups
        if not fits or not len(found):
            raise SbkitError(
                f"Codes must be whole numbers of the shape (frames, {self.groups}), but {of} has "
                f"{found.dtype} of the shape {found.shape}. Give what `encode` returned."
            )
        wrong = np.argwhere((found < 0) | (found >= self.size))
        if len(wrong):
            frame, group = wrong[0].tolist()
            raise SbkitError(
                f"Codes must be from 0 to {self.size - 1}, but {of} has {found[frame, group]} in "
                f"frame {frame}, codebook {group} ({len(wrong)} in all are out of range). Nothing "
                "is decoded; look for what predicted it."
            )
        return found.astype(np.int64)

    def fingerprint(self, **more: object) -> bytes:
        """Return the hash that files of these codes begin with; ``more`` tells codecs apart."""
        plain = {"groups": self.groups, "levels": self.levels, **more}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()


@dataclass(frozen=True, eq=False)
class Coded:
    """The codes (U, G) of so many samples of audio."""

    codes: Codes
    samples: int


def write_codes(file: Path, coded: Coded, space: CodeSpace, fingerprint: bytes) -> None:
    """Write the header, and the codes frame by frame, each in as few bits as hold it."""
    bits = coded.codes[..., None] >> np.arange(space.bits)[::-1] & 1  # (U, G, bits), highest first
    packed = np.packbits(bits.astype(np.uint8)).tobytes()
    write_bytes_atomically(file, HEADER.pack(MAGIC, fingerprint, coded.samples) + packed)


def read_codes(file: Path, space: CodeSpace, fingerprint: bytes, *, frame: int) -> Coded:
    """Read what `write_codes` wrote; ``frame`` is the samples of one.

    Raises SbkitError for a file of another codec, one that is cut short, and other indices.
    """
    content = read_regular(file, max_bytes=LARGEST, subject="A file of codes")
    magic, of, samples = HEADER.unpack(content[: HEADER.size].ljust(HEADER.size, b"\0"))
    if magic != MAGIC or of != fingerprint:
        came = "of another codec, whose codes are other sounds" if magic == MAGIC else "none"
        raise SbkitError(
            f"{file} must be a file of codes of this codec, but is {came}. Decode it with the "
            "bundle that encoded it."
        )
    shape = (-(-samples // frame), space.groups, space.bits)
    packed, count = np.frombuffer(content, np.uint8, offset=HEADER.size), math.prod(shape)
    if len(packed) != -(-count // 8):
        raise SbkitError(
            f"{file} must hold {shape[0]} frames in {-(-count // 8)} bytes after its header, but "
            f"has {len(packed)}: it is cut short, or was changed. Encode it again."
        )
    bits = np.unpackbits(packed, count=count).reshape(shape).astype(np.int64)
    return Coded(space.check(bits @ (1 << np.arange(space.bits)[::-1]), of=str(file)), samples)

"""Checksums: whether the files of a folder are still what was written into it.

Nothing is unpickled here, and a file that is not what its name says can neither block nor fill
its reader.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    read_regular,
    reading,
    write_text_atomically,
)

CHECKSUMS = "checksums.json"
SAVED = "hold what training saved"  # what a file of a checkpoint must
MAX_CHECKSUMS_BYTES = 1 << 24  # bytes of a list of checksums
# A file, what it is written in, or what it holds: no mapping, or not what is looked up in it.
UNREADABLE = (OSError, ValueError, RecursionError, LookupError, TypeError, SbkitError)


def checksum(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksum of every file in a folder beside them."""
    sums = {name: checksum(folder / name) for name in sorted(_files(folder))}
    write_text_atomically(folder / CHECKSUMS, json.dumps(sums, indent=1))


def check_unchanged(contents: Mapping[str, bytes], checksums: bytes, *, of: Path) -> None:
    """Compare the bytes of files with the checksums that were written beside them.

    What is compared is what will be parsed. A checksum finds accidents; it is no signature.
    Raises SbkitError.
    """
    with reading(of / CHECKSUMS, must=f"be the list of checksums of {of}", fix="Export it again."):
        expected = json.loads(checksums.decode())
    for name, content in contents.items():
        digest = expected.get(name) if isinstance(expected, dict) else None
        if digest != hashlib.sha256(content).hexdigest():
            why = "has no checksum" if digest is None else "is not what was written"
            raise SbkitError(f"{of} must be whole, but {name} {why}. Export it again.")


def find_damage(folder: Path) -> str | None:
    """Compare all files of a folder with their checksums; return None when all is well."""
    expected = listed_checksums(folder)
    if not expected:
        return f"its {CHECKSUMS} cannot be read"
    unknown = sorted(_files(folder) - expected.keys())
    if unknown:
        return f"{unknown[0]} has no checksum"
    for name, digest in expected.items():
        if not (folder / name).is_file():  # a device would never end, and a pipe never begin
            return f"{name} is not there"
        if checksum(folder / name) != digest:
            return f"{name} is not what was written"
    return None


def _files(folder: Path) -> set[str]:
    """Name the files of a folder without its checksums."""
    return {each.name for each in folder.iterdir() if not each.is_dir()} - {CHECKSUMS}


def listed_checksums(folder: Path) -> Mapping[str, str]:
    """Return the digest of each file; none where no list can be read."""
    try:
        listed = read_regular(folder / CHECKSUMS, largest=MAX_CHECKSUMS_BYTES, what="The checksums")
        return {**json.loads(listed)}
    except UNREADABLE:
        return {}

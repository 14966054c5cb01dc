"""Checksums show whether the files of a folder are as they were written.

Nothing is unpickled here, and a pipe or a device in place of a file cannot block the reader.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading, write_text_atomically

CHECKSUMS = "checksums.json"
# What `reading` requires of a file in a checkpoint.
CHECKPOINT_CONTENT = "hold what training saved"
MAX_CHECKSUMS_BYTES = 1 << 24
# Errors of reading a file, decoding it, or finding an expected key in it.
READ_ERRORS = (OSError, ValueError, RecursionError, LookupError, TypeError, SbkitError)


def checksum(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksum of every file in a folder into `CHECKSUMS`."""
    sums = {name: checksum(folder / name) for name in sorted(_files(folder))}
    write_text_atomically(folder / CHECKSUMS, json.dumps(sums, indent=1))


def check_unchanged(contents: Mapping[str, bytes], checksums: bytes, *, folder: Path) -> None:
    """Compare the bytes that will be parsed with the checksums written beside the files.

    A checksum finds accidents; it is not a signature. Raises SbkitError.
    """
    with reading(
        folder / CHECKSUMS, f"be the list of checksums of {folder}", fix="Export it again."
    ):
        expected = json.loads(checksums.decode())
    for name, content in contents.items():
        digest = expected.get(name) if isinstance(expected, dict) else None
        if digest != hashlib.sha256(content).hexdigest():
            damage = "has no checksum" if digest is None else "is not what was written"
            raise SbkitError(f"{folder} is damaged: {name} {damage}. Export it again.")


def find_damage(folder: Path) -> str | None:
    """Describe the first file of a folder that differs from its checksum; None if all match.

    Files in subfolders are not checked.
    """
    expected = listed_checksums(folder)
    if not expected:
        return f"its {CHECKSUMS} cannot be read"
    unknown = sorted(_files(folder) - expected.keys())
    if unknown:
        return f"{unknown[0]} has no checksum"
    for name, digest in expected.items():
        if not (folder / name).is_file():  # reading a device would never end, a pipe never begin
            return f"{name} is missing"
        if checksum(folder / name) != digest:
            return f"{name} is not what was written"
    return None


def _files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if not file.is_dir()} - {CHECKSUMS}


def listed_checksums(folder: Path) -> Mapping[str, str]:
    """Return the listed digest of each file; an empty mapping if the list cannot be read."""
    file = folder / CHECKSUMS
    try:
        content = read_regular(file, max_bytes=MAX_CHECKSUMS_BYTES, subject="The checksums")
        return {**json.loads(content)}
    except READ_ERRORS:
        return {}

"""Checksums of the files in a folder, which show later whether a file has changed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    parsing_errors,
    plain_name,
    pointer_sentence,
    read_regular,
    write_text_atomically,
)

CHECKSUMS = "checksums.json"
MAX_HASHED_BYTES = 1 << 36  # a terabyte of zeros, which takes no space, would take an hour
# Errors of reading a file, parsing it, and looking up a key in it.
READ_ERRORS = (OSError, ValueError, RecursionError, LookupError, TypeError, SbkitError)


def checksum(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    if file.stat().st_size > MAX_HASHED_BYTES:
        raise SbkitError(f"{file} has over {MAX_HASHED_BYTES} bytes, more than any model.")
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksum of every file in a folder into `CHECKSUMS`."""
    files = sorted(file for file in folder.iterdir() if not file.is_dir())
    sums = {file.name: checksum(file) for file in files if file.name != CHECKSUMS}
    write_text_atomically(folder / CHECKSUMS, json.dumps(sums, indent=1))


def check_unchanged(contents: Mapping[str, bytes], checksums_json: bytes, *, folder: Path) -> None:
    """Raise SbkitError if the bytes of a file differ from its checksum.

    Checksums are no signature: whoever changes a file can change its checksum, too.

    contents: the bytes of files, by name.
    checksums_json: the content of the folder's `CHECKSUMS`.
    """
    file = folder / CHECKSUMS
    with parsing_errors(file, "list the checksums", fix="Export it again.", is_json=True):
        checksums = dict(json.loads(checksums_json))
    for name, content in contents.items():
        if name not in checksums:
            raise SbkitError(f"{folder} is damaged: {name} has no checksum. Export it again.")
        if checksums[name] != hashlib.sha256(content).hexdigest():
            raise SbkitError(
                pointer_sentence(folder / name)
                or f"{folder} is damaged: {name} is not what was written. Export it again."
            )


def find_damage(folder: Path) -> str | None:
    """Describe the first listed file of a folder that differs from its checksum; None if all match.

    Other files are ignored: systems and editors leave `Thumbs.db`, `.nfs0000` or `~$model`.
    """
    expected = read_checksums(folder)
    if not expected:
        return f"its {CHECKSUMS} cannot be read"
    for name, digest in expected.items():
        if not (folder / name).is_file():  # reading a pipe or a device might never end
            return f"{name} is missing"
        if checksum(folder / name) != digest:
            return f"{name} is not what was written"
    return None


def read_checksums(folder: Path) -> Mapping[str, str]:
    """Return the listed checksum of each file.

    The mapping is empty if the list cannot be read, or names a file outside the folder.
    """
    file = folder / CHECKSUMS
    try:
        checksums = dict(json.loads(read_regular(file, subject="The checksums")))
        return {plain_name(name, file=file): digest for name, digest in checksums.items()}
    except READ_ERRORS:
        return {}

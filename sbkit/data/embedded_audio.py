"""Audio that a saved dataset holds itself, as files in the cache: everything else reads files."""

import hashlib
import os
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.data.audio_cache import default_cache
from sbkit.data.shard import CORPUS_FILE, write_sealed

EMBEDDED_FOLDER = "embedded"  # of the cache
LONGEST_NAME = 200  # bytes of at most 255


def write_embedded(content: bytes, name: str, source: Path) -> Path:
    """Write the bytes of one audio file, unless they are there, and return where.

    The name is the one that the dataset gives, in a folder of its own: the clip's id is made of it.

    Raises:
        SbkitError: the cache cannot be written, or its disk is full.
    """
    key = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:12]
    folder = default_cache() / EMBEDDED_FOLDER / f"{source.name}-{key}"
    digest = hashlib.sha256(content).hexdigest()[:16]
    plain = Path(name).name
    if not plain.isprintable() or plain in ("", "..") or len(os.fsencode(plain)) > LONGEST_NAME:
        plain = digest
    file = folder / digest[:2] / digest / plain
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if not (folder / CORPUS_FILE).is_file():
                write_sealed(folder / CORPUS_FILE, {"folder": str(source.resolve())})
            write_bytes_atomically(file, content)
        except OSError as error:
            raise SbkitError(
                f"The audio of {source} must be written to {folder}, but that fails "
                f"({error.strerror}). Make room, or let SBKIT_CACHE name another folder."
            ) from error
    return file

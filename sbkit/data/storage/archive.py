"""A corpus that is still packed: a tar file, unpacked once into the cache, whole or not at all."""

import hashlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.data.storage.audio_cache import (
    CORPUS_FILE,
    EMBEDDED_FOLDER,
    default_cache,
    describe_folder,
)
from sbkit.data.storage.filesystem import writing
from sbkit.logs.log import log

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PIECE = 1 << 20  # bytes


def is_archive(path: Path) -> bool:
    """Return whether a path is a tar file, by its name."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def unpacked(corpus: Path) -> Path:
    """Return the folder of a corpus; an archive is unpacked into the cache, unless it is there.

    Only files and folders are unpacked, no links and no devices. What is unpacked belongs to the
    archive as it is now: its path, size and time.

    Raises:
        SbkitError: the archive is damaged or leads out of its folder, or there is no room for it.
    """
    if not is_archive(corpus):
        return corpus
    archive, facts = corpus.resolve(), corpus.stat()
    known_by = f"{archive}\n{facts.st_size}\n{facts.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(known_by)).hexdigest()[:12]
    folder = default_cache() / EMBEDDED_FOLDER / f"{archive.name}-{key}"
    if not folder.is_dir():
        log(f"unpacking {archive} into {folder}, once")
        with writing(folder.parent), building(folder) as beside:
            _extract(archive, beside)
            describe_folder(beside, archive)
    return _innermost(folder)


def _extract(archive: Path, folder: Path) -> None:
    """Write what an archive holds into a folder; read it to its end, where its checksum stands."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined] # 0.9 GB for two million clips
                path = PurePosixPath(member.name)  # Python before 3.11.4 has no filter for it
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"it names {member.name[:200]!r}, out of its folder")
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with content, (folder / path).open("wb") as target:
                        shutil.copyfileobj(content, target, PIECE)
            while tar.fileobj is not None and tar.fileobj.read(PIECE):
                pass
    except Exception as error:  # the libraries that unpack have errors of many kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SbkitError(
            f"{archive} must be a whole tar file, but cannot be unpacked ({str(error)[:200]}). "
            "Download it again."
        ) from error


def _innermost(folder: Path) -> Path:
    """Go down as long as a folder holds one folder and nothing else."""
    inside = [each for each in folder.iterdir() if each.name != CORPUS_FILE]
    is_alone = len(inside) == 1 and inside[0].is_dir() and inside[0].name != "clips"
    return _innermost(inside[0]) if is_alone else folder

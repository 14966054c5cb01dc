"""A corpus that is still packed: a tar file, unpacked once into the cache, whole or not at all."""

import hashlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.data.storage.audio_cache import EMBEDDED_FOLDER, default_cache, note_use
from sbkit.data.storage.fill import DISK_FULL
from sbkit.data.storage.shard import CORPUS_FILE, write_sealed
from sbkit.logs.log import say

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PIECE = 1 << 20  # bytes
LARGEST_READ = 1 << 24  # bytes; the attributes of a file have some hundred
MOST_TIMES = 100  # the packed bytes: speech and its tables have less, zeros have a thousand
LEAST_LIMIT = 1 << 30  # bytes that are always allowed


def is_archive(path: Path) -> bool:
    """Return whether a path is a tar file, by its name."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def unpacked(corpus: Path) -> Path:
    """Return the folder of a corpus, unpacking it where it is an archive."""
    return unpack(corpus) if is_archive(corpus) else corpus


def unpack(archive: Path) -> Path:
    """Unpack an archive into the cache, unless it is there, and return the corpus in it.

    Only files and folders are unpacked, no links and no devices. What is unpacked belongs to the
    archive as it is now: its path, size and time.

    Raises:
        SbkitError: the archive is damaged or leads out of its folder, or there is no room for it.
    """
    facts = archive.stat()
    known_by = f"{archive.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(known_by)).hexdigest()[:12]
    folder = default_cache() / EMBEDDED_FOLDER / f"{archive.name}-{key}"
    if not folder.is_dir():
        say(f"unpacking {archive} into {folder}, once")
        try:
            with building(folder) as beside:
                _extract(archive, beside)
                write_sealed(beside / CORPUS_FILE, {"folder": str(archive.resolve())})
        except OSError as error:
            raise _unusable(archive, folder, error) from error
    note_use(folder)
    return _innermost(folder)


def _extract(archive: Path, folder: Path) -> None:
    """Write what an archive holds into a folder; read it to its end, where its checksum stands."""
    try:
        most = max(LEAST_LIMIT, MOST_TIMES * archive.stat().st_size)
        how: Any = {"mode": "r:*", "most": most}
        with archive.open("rb") as packed, _Tar.open(fileobj=packed, **how) as tar:
            for member in tar:
                tar.members.clear()  # it would keep all of them: 0.9 GB of two million clips
                if member.issparse() or member.size < 0:
                    raise tarfile.ReadError("a file in it has holes, or less than no bytes")
                if member.isfile():
                    _write(tar, member, folder / _inside(member.name, archive))
            while tar.fileobj is not None and tar.fileobj.read(PIECE):
                pass
    except (SbkitError, OSError):
        raise
    except Exception as error:  # whatever a damaged archive does to a library, it is the archive's
        raise _damaged(archive, error) from error


class _Tar(tarfile.TarFile):
    """A tar file that is read through `_Unpacked`; ``most`` is its limit."""

    members: list[tarfile.TarInfo]  # that were read

    def __init__(self, name: Any, mode: Any, fileobj: Any, *, most: int) -> None:
        content: Any = _Unpacked(fileobj, most)
        super().__init__(name, mode, content)


class _Unpacked:
    """The content of a packed file, refused where it goes on for more than ``most`` bytes.

    tarfile reads the attributes of a file at once, and as many as their own header says.
    """

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        """Read some bytes; raises tarfile.ReadError for too many."""
        if not 0 <= size <= LARGEST_READ or self.tell() > self._most:
            raise tarfile.ReadError("it unpacks to more than a corpus can")
        content: bytes = self._file.read(size)
        return content


def _inside(name: str, archive: Path) -> PurePosixPath:
    """Return a name as a path that stays in its folder; Python before 3.11.4 has no filter."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise SbkitError(
            f"{archive} must hold files of its own folder, but names {name[:200]!r}. Pack the "
            "corpus again."
        )
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None  # it is a file
    with content, file.open("wb") as target:
        shutil.copyfileobj(content, target, PIECE)


def _unusable(archive: Path, folder: Path, error: OSError) -> SbkitError:
    if error.errno in DISK_FULL:
        return SbkitError(
            f"There must be room to unpack {archive} into {folder.parent}, but there is none "
            f"({error.strerror}). Make room, or let SBKIT_CACHE name another folder."
        )
    return _damaged(archive, error)


def _damaged(archive: Path, error: Exception) -> SbkitError:
    reason = (str(error) or type(error).__name__)[:200]
    return SbkitError(
        f"{archive} must be a whole tar file, but cannot be unpacked ({reason}). Download it again."
    )


def _innermost(folder: Path) -> Path:
    """Go down as long as a folder holds one folder and nothing else."""
    while True:
        with os.scandir(folder) as entries:
            inside = [each for each in entries if each.name != CORPUS_FILE]
        if len(inside) != 1 or not inside[0].is_dir() or inside[0].name == "clips":
            return folder
        folder = Path(inside[0].path)

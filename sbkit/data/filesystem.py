"""Files of a local disk, a network file system or an object store, by the URLs of `fsspec`.

Keys and endpoints are set as fsspec and the store have it: in configuration files, and in variables
such as FSSPEC_S3_KEY.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from sbkit.base.errors import SbkitError
from sbkit.base.files import naming, write_bytes_atomically

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


ByteRange = tuple[str, int, int]  # URL of a file, first byte, number of bytes


@dataclass(frozen=True)
class Storage:
    """A folder, by its URL or its path on this machine; its methods raise SbkitError."""

    url: str

    @classmethod
    def at(cls, place: str) -> "Storage":
        """Name a folder; a path becomes absolute."""
        if "://" not in place:
            return cls(str(Path(place).expanduser().absolute()))
        _file_system(place)
        return cls(place.rstrip("/"))

    @property
    def folder(self) -> Path | None:
        """Return the folder as a path where it is on this machine, else None."""
        system, path = _file_system(self.url)
        return Path(path) if isinstance(system, LocalFileSystem) else None

    def file(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def list_files(self, suffixes: Sequence[str]) -> list[str]:
        """Return the files below that have one of some endings, sorted: URLs, or paths here."""
        system, path = _file_system(self.url)
        with _reaching(self.url):
            found = sorted(each for each in system.find(path) if each.endswith(tuple(suffixes)))
        return found if self.folder else [system.unstrip_protocol(each) for each in found]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return how many bytes each file has, and None for one that is not there."""
        system, _ = _file_system(self.url)
        paths = [_file_system(self.file(name))[1] for name in names]
        with _reaching(self.url):
            try:
                return list(system.sizes(paths))  # an object store is asked for many at once
            except (FileNotFoundError, NotADirectoryError):
                return [system.size(each) if system.exists(each) else None for each in paths]

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        system, path = _file_system(self.file(name))
        with _reaching(self.file(name)):
            content: bytes = system.cat_file(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all; raises OSError for a disk of this machine."""
        if self.folder is not None:
            write_bytes_atomically(self.folder / name, content)
            return
        system, path = _file_system(self.file(name))
        with _reaching(self.url):
            system.pipe_file(path, content)

    def take(self, file: Path, name: str) -> None:
        """Move a file there; where it is on this machine, it must be a file of the same folder."""
        if self.folder is not None:
            with naming(self.folder / name):
                file.rename(self.folder / name)
            return
        system, path = _file_system(self.file(name))
        with _reaching(self.url):
            system.put_file(str(file), path)
        file.unlink()


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Read parts of files of one file system; an object store is asked for many at once.

    Raises:
        SbkitError: a file is missing, ends before its part does, or cannot be read.
    """
    if not ranges:
        return []
    files, starts, sizes = zip(*ranges, strict=True)
    paths = {each: _file_system(each) for each in {*files}}
    system, _ = paths[files[0]]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    with _reaching(files[0]):
        contents: list[bytes] = system.cat_ranges(
            [paths[each][1] for each in files], list(starts), ends, on_error="raise"
        )
    for file, content, size in zip(files, contents, sizes, strict=True):
        if len(content) != size:
            raise SbkitError(
                f"{file} must be whole, and its server must know ranges of bytes, but "
                f"{len(content)} bytes came for {size}. Copy it again, or remove it and prepare "
                "the shards again, or take another server."
            )
    return contents


def _file_system(url: str) -> tuple[Any, str]:
    """Return what reads a URL, and its path there; raises SbkitError.

    fsspec keeps one object for each kind of system and process: a loader's worker gets its own.
    """
    try:
        system, path = fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise SbkitError(
            f"{url} must be of a protocol that fsspec reads here, but is not ({error}). Install "
            "what it needs (s3fs for s3, gcsfs for gs), or name a folder."
        ) from error
    return system, str(path)


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn what a file system raises into one sentence: each has errors of its own."""
    try:
        yield
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SbkitError(
            f"{url} must be reachable, but is not: {type(error).__name__}, {reason[:200]}. Check "
            "the name, the rights and the network."
        ) from error


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Raise SbkitError where the disk of ``place`` is full or read-only."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SbkitError(
                f"The disk of {place} must have room for prepared data, but is full. Free some, "
                "with `sbkit cache prune` or by hand, let SBKIT_CACHE name a folder on another "
                "disk, or keep less: --audio_store=flac, or none. What is finished stays, and the "
                "same command continues from there."
            ) from error
        if error.errno in READ_ONLY:
            raise SbkitError(
                f"{place} must be a folder to write to, but is not: {error.strerror}. Choose "
                "another one; SBKIT_CACHE names that of prepared data."
            ) from error
        raise

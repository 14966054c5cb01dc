"""Files of a local disk, a network file system or an object store, by the URLs of `fsspec`.

Keys and endpoints are set as fsspec and the store have it: in configuration files, and in variables
such as FSSPEC_S3_KEY.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from sbkit.base.errors import SbkitError
from sbkit.base.files import naming, write_bytes_atomically

LARGEST_TRANSFER = 64  # files that are asked for at once


class MissingFileError(SbkitError):
    """A file that is not there."""


@dataclass(frozen=True)
class ByteRange:
    """A part of a file, which is named by its URL."""

    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Storage:
    """A folder, by its URL or its path on this machine."""

    url: str

    @classmethod
    def at(cls, place: str) -> "Storage":
        """Name a folder; a path becomes absolute.

        Raises:
            SbkitError: nothing that is installed knows the protocol.
        """
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
        """Return the files below that have one of some endings, sorted: URLs, or paths here.

        Raises:
            SbkitError: the place cannot be read.
        """
        system, path = _file_system(self.url)
        with _reaching(self.url):
            found = sorted(each for each in system.find(path) if each.endswith(tuple(suffixes)))
        return found if self.folder else [system.unstrip_protocol(each) for each in found]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return how many bytes each file has, and None for one that is not there.

        Raises:
            SbkitError: the place cannot be read.
        """
        system, _ = _file_system(self.url)
        paths = [_file_system(self.file(name))[1] for name in names]
        with _reaching(self.url):
            try:
                return list(system.sizes(paths))  # an object store is asked for many at once
            except (FileNotFoundError, NotADirectoryError):
                return [system.size(each) if system.exists(each) else None for each in paths]

    def read(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the content of files, several of which are asked for at once.

        Raises:
            MissingFileError: one of them is missing.
            SbkitError: one of them cannot be read.
        """
        for start in range(0, len(names), LARGEST_TRANSFER):
            files = [self.file(name) for name in names[start : start + LARGEST_TRANSFER]]
            everything = [None] * len(files)
            for file, found in zip(files, _fetch(files, everything, everything), strict=True):
                yield _require_content(found, file)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all.

        Raises:
            SbkitError: it cannot be written there.
            OSError: it cannot be written to the disk of this machine.
        """
        if self.folder is not None:
            write_bytes_atomically(self.folder / name, content)
            return
        system, path = _file_system(self.file(name))
        with _reaching(self.url):
            system.pipe_file(path, content)

    def take(self, file: Path, name: str) -> None:
        """Move a file there; where it is on this machine, it must be a file of the same folder.

        Raises:
            SbkitError: it cannot be written there.
        """
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
    contents = _fetch(
        [each.file for each in ranges],
        [each.start for each in ranges],
        [each.start + each.size for each in ranges],
    )
    return [
        _require_content(content, each.file, each.size)
        for content, each in zip(contents, ranges, strict=True)
    ]


def _fetch(
    files: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]
) -> list[Any]:
    """Return parts of files, or what is wrong with one; no name is taken for a pattern."""
    system, _ = _file_system(files[0])
    paths = {file: _file_system(file)[1] for file in {*files}}
    with _reaching(files[0]):
        found = system.cat_ranges([paths[f] for f in files], starts, ends, on_error="return")
    return list(found)


def _require_content(content: object, file: str, size: int | None = None) -> bytes:
    if isinstance(content, FileNotFoundError):
        raise MissingFileError(f"{file} must be there, but is missing. Put it back.")
    if isinstance(content, BaseException):
        raise _unreachable(file, content) from content
    assert isinstance(content, bytes)
    if size is not None and len(content) != size:
        raise SbkitError(
            f"{file} must be whole, and its server must know ranges of bytes, but {len(content)} "
            f"bytes came for {size}. Copy it again, or remove it and prepare the shards again, or "
            "take another server."
        )
    return content


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
        raise _unreachable(url, error) from error


def _unreachable(url: str, error: BaseException) -> SbkitError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SbkitError(
        f"{url} must be reachable, but is not: {type(error).__name__}, {reason[:200]}. Check the "
        "name, the rights and the network."
    )

"""Access files on a disk, a network file system or an object store by the URLs of `fsspec`.

Users configure keys and endpoints as the documentation of fsspec and of the store says: in files,
or in variables such as FSSPEC_S3_KEY.
"""

import gzip
import lzma
import shutil
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from sbkit.base.errors import CODE_FAULTS, DataError, SbkitError, StoreError, translate
from sbkit.base.files import os_errors_name, pointer_sentence, write_bytes_atomically
from sbkit.base.stores import DISK_FULL_ERRORS, NOT_WRITABLE_ERRORS, is_temporary

UNPACKING_ERRORS = (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError)

# By default aiohttp, which fsspec calls, ignores the proxies that http_proxy and https_proxy name.
for protocol in ("http", "https"):
    fsspec.config.conf.setdefault(protocol, {"client_kwargs": {"trust_env": True}})


def _unpack_zstd(file: IO[bytes], mode: str) -> IO[bytes]:
    """Unpack a file to the disk, because JSON is read twice, and zstandard cannot seek back."""
    with ExitStack() as stack:
        unpacked: IO[bytes] = stack.enter_context(TemporaryFile())
        shutil.copyfileobj(pa.CompressedInputStream(file, "zstd"), unpacked)
        unpacked.seek(0)
        stack.pop_all()  # the caller closes it
    return unpacked


fsspec.compression.register_compression("zstd", _unpack_zstd, "zst", force=True)

Item = TypeVar("Item")
Result = TypeVar("Result")
ByteRange = tuple[str, int, int]  # URL of a file, first byte, number of bytes


class Storage:
    """A folder on this machine or in an object store; its methods raise DataError or StoreError.

    If the folder is on this machine, `write` and `move_in` raise OSError; see `disk_errors`.

    location: a URL, or a path, which is made absolute.

    >>> Storage("memory://corpus").url_of("corpus.json")
    'memory://corpus/corpus.json'
    """

    def __init__(self, location: str | Path) -> None:
        url = str(location)
        _, separator, path = url.partition("://")
        if not separator:
            url = str(Path(url).expanduser().absolute())
        elif path.strip("/"):  # without a path, as in file:///, the slashes belong to the root
            url = url.rstrip("/")
        self.url = url
        self._system, self._path = _file_system(self.url)
        self._system.invalidate_cache(self._path)  # other processes write there
        is_local = isinstance(self._system, LocalFileSystem)
        self.folder = Path(self._path) if is_local else None  # None: not on this machine

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def find(self, prefix: str, suffix: str) -> list[str]:
        """Return the names of the files in the folder with this prefix and suffix; list it once."""
        with access_errors(self.url):
            if self.folder is not None:
                names = (
                    [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
                )
            else:
                paths: list[str] = self._system.find(self._path, prefix=prefix)
                names = [path.removeprefix(f"{self._path}/") for path in paths]
        names = [name for name in names if "/" not in name]
        return [name for name in names if name.startswith(prefix) and name.endswith(suffix)]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each file in bytes, or None if it is missing."""
        system = self._system
        paths = [f"{self._path}/{name}" for name in names]
        with access_errors(self.url):
            try:
                return list(system.sizes(paths))  # concurrent requests to an object store
            except (FileNotFoundError, NotADirectoryError) as error:
                if is_temporary(error, of_store=True):
                    raise
                return [system.size(path) if system.exists(path) else None for path in paths]

    def listed_sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return `sizes` from one listing of the folder, if the file system has listings."""
        if self.url.startswith(("http://", "https://")):
            return self.sizes(names)
        with access_errors(self.url):
            entries = self._system.ls(self._path, detail=True)
        sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}
        return [sizes.get(name) for name in names]

    def fetch(self, name: str, scratch: Path) -> Path:
        """Return the local path of a file; a file at a URL is copied into ``scratch``."""
        if self.folder is not None:
            return self.folder / name
        with access_errors(self.url_of(name)):
            self._system.get_file(f"{self._path}/{name}", str(scratch / name))
        return scratch / name

    def read(self, name: str) -> bytes:
        with access_errors(self.url_of(name)):
            content: bytes = self._system.cat_file(f"{self._path}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        if self.folder is not None:
            write_bytes_atomically(self.folder / name, content)
            return
        with access_errors(self.url):
            self._system.pipe_file(f"{self._path}/{name}", content)

    def move_in(self, file: Path, name: str) -> None:
        """Move a local file into the folder; if the folder is local, the file must be in it."""
        if self.folder is not None:
            with os_errors_name(self.folder / name):
                file.rename(self.folder / name)
            return
        with access_errors(self.url):
            self._system.put_file(str(file), f"{self._path}/{name}")
        file.unlink()

    def remove(self, name: str) -> None:
        with access_errors(self.url_of(name)):
            self._system.rm_file(f"{self._path}/{name}")


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Read ranges of files on one file system; an object store is read in parallel."""
    if not ranges:
        return []
    files, starts, sizes = zip(*ranges, strict=True)
    paths = {file: _file_system(file)[1] for file in {*files}}
    system, _ = _file_system(files[0])
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    with access_errors(files[0]):
        contents: list[bytes] = system.cat_ranges(
            [paths[file] for file in files], list(starts), ends, on_error="raise"
        )
    for file, content, size in zip(files, contents, sizes, strict=True):
        if len(content) != size:
            raise DataError(
                f"{file}: {len(content)} bytes were read instead of {size}. The file is truncated, "
                "or its server does not support byte ranges."
            )
    return contents


def _file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, and the URL's path in it."""
    try:
        system, path = fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise DataError(
            f"fsspec cannot open {url} here ({error}). Install the package for its protocol (s3fs "
            "for s3, gcsfs for gs)."
        ) from error
    return system, str(path)


@contextmanager
def access_errors(url: str) -> Iterator[None]:
    """Turn the errors of any file system into StoreError or DataError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (SbkitError, *CODE_FAULTS)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sentence = f"{url} cannot be reached: {type(error).__name__}, {reason[:200].rstrip('.')}."
        raise (StoreError if is_temporary(error, of_store=True) else DataError)(sentence) from error


def disk_errors(location: Path | str) -> AbstractContextManager[None]:
    """Raise DataError if the disk of ``location`` is full or ``location`` cannot be written to."""

    def describe(error: OSError) -> str | None:
        if error.errno in DISK_FULL_ERRORS:
            return (
                f"The disk of {location} is full. Free space, for example with `sbkit cache "
                "prune`, or set SBKIT_CACHE (for temporary files: TMPDIR) to a folder on another "
                "disk. Then rerun the same command to resume."
            )
        if error.errno in NOT_WRITABLE_ERRORS:
            return (
                f"{location} cannot be written to: {error.strerror}. Choose another folder; set "
                "SBKIT_CACHE for prepared data."
            )
        return None

    return translate(OSError, DataError, describe)


def unpacking_errors(file: Path | str, failure: str, *, fix: str) -> AbstractContextManager[None]:
    """Turn errors of tarfile and its decompressors into DataError: "FILE FAILURE (ERROR). FIX"."""

    def describe(error: Exception) -> str | None:
        # The OSError of a parser has no number. A store may raise one without a number, too, but
        # it is a subclass.
        is_of_system = isinstance(error, OSError) and (
            error.errno is not None or type(error) not in (OSError, gzip.BadGzipFile)
        )
        fault = f"{file} {failure} ({str(error)[:200]}). {fix}"
        return None if is_of_system else pointer_sentence(file) or fault

    return translate(UNPACKING_ERRORS, DataError, describe)


def map_ahead(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int = 32
) -> Iterator[Result]:
    """Yield the results of a pool in the order of items; submit at most ``ahead`` in advance."""
    items = iter(items)
    waiting = deque(pool.submit(work, item) for item in islice(items, ahead))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(pool.submit(work, item) for item in islice(items, 1))
        yield result


def iter_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar without keeping them in memory."""
    for member in tar:
        tar.members.clear()  # type: ignore[attr-defined] # saves 0.9 GB for two million clips
        yield member

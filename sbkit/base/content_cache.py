"""What is kept between two starts: addressed by everything that it was made from.

    kind, inputs -> hash -> CACHE/KIND/HASH, which one process makes

An input is plain data, or the digest of a file. A file that has its size and times of an earlier
start has its digest, too; any other file is read again.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.files import (
    fsync_path,
    fsync_tree,
    remove,
    remove_abandoned,
    task_lock,
    temporary_path,
    write_bytes_atomically,
)
from sbkit.base.versions import code_identity

logger = logging.getLogger(__name__)

NUM_ADDRESS_DIGITS, NUM_CODE_DIGITS = 16, 8
ADDRESS = re.compile(rf"\b[0-9a-f]{{{NUM_ADDRESS_DIGITS}}}-[0-9a-f]{{{NUM_CODE_DIGITS}}}$")
FILES_FOLDER = "files"  # of a cache: the digests of files
MAX_LOOKS = 100_000  # files of a folder that are looked at one by one at each start
NUM_SAMPLED_FILES = 2000  # of more files
CHUNK_FILES = 500  # that a thread looks at
NUM_THREADS = 8  # they wait for a disk, perhaps of another machine
MAX_READ_BYTES = 1 << 32  # of a larger file, size and times are the digest

_KNOWN_COLUMNS = pa.schema(
    {"name": pa.binary(), "size": pa.int64(), "stamp": pa.int64(), "digest": pa.string()}
)
Result = TypeVar("Result")

is_verifying = ContextVar("is_verifying", default=False)


@contextmanager
def verifying() -> Iterator[None]:
    """Prepare all splits again, and read all their files."""
    before = is_verifying.set(True)
    try:
        yield
    finally:
        is_verifying.reset(before)


# Caches


def caches() -> list[Path]:
    """Return the folders of ``$SBKIT_CACHE``, which colons separate; the first is written to.

    Without it: ``$XDG_CACHE_HOME/sbkit`` (see `user_folders`), or ``~/.cache/sbkit``.
    """
    if folders := [*filter(None, os.environ.get("SBKIT_CACHE", "").split(os.pathsep))]:
        return [Path(folder).expanduser().absolute() for folder in folders]
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [Path(parent).expanduser() / "sbkit"]


def default_cache() -> Path:
    """Return the cache that is written to."""
    return caches()[0]


def find_kept(name: str | Path) -> Path | None:
    """Return a file or folder of the first cache that has it, None if none has.

    ``name`` is relative to the caches; an absolute path is returned as it is.
    """
    paths = (folder / name for folder in caches())
    return next((path for path in paths if os.path.lexists(path)), None)


def name_in_caches(path: Path) -> str:
    """Return a path relative to the cache that has it, so that a cache can be moved."""
    inside = (path.relative_to(folder) for folder in caches() if path.is_relative_to(folder))
    return str(next(inside, path))


@cache
def _session_folder() -> Path:
    """Return a folder that is removed when the process ends."""
    folder = TemporaryDirectory(prefix="sbkit-kept-")
    _session_folder.folder = folder  # type: ignore[attr-defined] # it is removed with its object
    return Path(folder.name)


def keep(
    kind: str,
    made_from: Mapping[str, object],
    make: Callable[[Path], None],
    *,
    by_code: bool = True,
    label: str = "",
    is_current: Callable[[Path], object] = os.path.lexists,
    meanwhile: Callable[[], None] = lambda: None,
) -> Path:
    """Return the file or folder that was made from these inputs, by an earlier call or by this one.

    One process makes it. If no cache can be written to, it is kept until this process ends.

    kind: the folder in the cache.
    made_from: plain data that names all inputs.
    make: writes the file or folder, whose path it is given.
    by_code: whether the code of sbkit is an input, too.
    label: the start of its name.
    is_current: whether what is kept can be used; it may raise OSError or ValueError.
    meanwhile: called in a process that waits for another one to make it.
    """
    name = kept_name(kind, made_from, by_code=by_code, label=label)
    path = default_cache() / name
    before = _inode_of(path)
    if earlier_path := find_made(name, is_current):
        return earlier_path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with task_lock(path.parent, path.name, wait=False) as is_maker:
            if not is_maker:
                meanwhile()
            elif _inode_of(path) == before:  # no other process has made it since
                _replace(path, make)
        if not is_maker:
            with task_lock(path.parent, path.name, wait=True):
                if _inode_of(path) == before:  # the other process has failed
                    _replace(path, make)
    except OSError as error:  # a cache may be read-only, or full
        logger.info(f"note: {path} is made again at the next start, because {error}")
        path = _session_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, make)
    return path


def find_made(name: Path, is_current: Callable[[Path], object]) -> Path | None:
    """Return what `keep` has made under a `kept_name`, if it can be used."""
    for folder in (*caches(), _session_folder()):
        with suppress(OSError, ValueError):  # it is damaged
            if os.path.lexists(folder / name) and is_current(folder / name):
                return folder / name
    return None


def kept_name(
    kind: str, made_from: Mapping[str, object], *, by_code: bool = True, label: str = ""
) -> Path:
    """Return where `keep` keeps something, relative to the caches."""
    code = f"-{code_identity()[:NUM_CODE_DIGITS]}" if by_code else ""
    inputs = json.dumps(made_from, default=str, sort_keys=True).encode()
    digest = hashlib.sha256(inputs).hexdigest()[:NUM_ADDRESS_DIGITS]
    return Path(kind, f"{label}-{digest}{code}".lstrip("-."))


def _inode_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def remove_files_of_other_code(cache_folder: Path) -> None:
    """Remove the files that this version of sbkit does not read any more."""
    code = code_identity()[:NUM_CODE_DIGITS]
    for file in cache_folder.glob("*/*"):
        if file.is_file() and ADDRESS.search(file.name) and not file.name.endswith(f"-{code}"):
            file.unlink()


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file or folder under another name, and rename it once it is whole."""
    remove_abandoned(path.parent)
    unfinished = temporary_path(path)
    try:
        make(unfinished)
        (fsync_tree if unfinished.is_dir() else fsync_path)(unfinished)
        if path.is_dir():  # an earlier one; processes that map its files keep them
            shutil.rmtree(path)
        unfinished.replace(path)
    finally:
        remove(unfinished)


# Files


class FileDigests(NamedTuple):
    """The content of files, by their indices."""

    digests: pa.Array  # null for a file that cannot be read
    sizes: npt.NDArray[np.int64]  # bytes; -1 for such a file
    errors: Mapping[int, OSError | ValueError]  # of such files


def file_digests(root: Path, names: Iterable[str] | pa.Array, *, read: bool = True) -> FileDigests:
    """Return the digests of files below a folder.

    The size and the times of each file are looked at, and files with new ones are read. Of more
    than `MAX_LOOKS` files, the times of their folders are looked at first, and a spread sample.

    names: relative to the folder; an array of binary is faster.
    read: whether to read files; else their sizes are their digests.
    """
    if not isinstance(names, pa.Array):
        names = pa.array(map(os.fsencode, names), pa.binary())
    are_many = len(names) > MAX_LOOKS
    known_files = _KnownFiles.load(root, read) if are_many or read else _KnownFiles()
    files = known_files.take(names)
    folders = known_files.folders
    indices = np.arange(len(names))  # of the files to look at
    if are_many:
        if known_files.is_as_it_was(root) and not is_verifying.get():
            indices = np.flatnonzero(files["digest"].is_null())
        else:
            # The times of folders tell nothing of files that are not listed.
            known_files = _KnownFiles()
        new_names = names.take(pa.array(indices)).to_pylist()
        parents = {os.fsdecode(name.rpartition(b"/")[0]) for name in new_names}
        times = {name: _look(root, os.fsencode(name)).stamp for name in sorted(parents)}
        folders = {**times, **known_files.folders}
    looks = _in_threads(partial(_look, root), names.take(pa.array(indices)).to_pylist())
    sizes, stamps = (files[name].to_numpy().copy() for name in ("size", "stamp"))
    new = [
        index
        for index, look in zip(indices.tolist(), looks, strict=True)
        if look != (sizes[index], stamps[index]) or look[0] < 0 or is_verifying.get()
    ]
    if not new and folders == known_files.folders:
        return FileDigests(files["digest"].combine_chunks(), sizes, {})
    sizes[indices], stamps[indices] = np.fromiter(chain(*looks), np.int64).reshape(-1, 2).T
    if read and len(new) > CHUNK_FILES:
        logger.info(f"{root}: {len(new)} files are new or have other times, and are read")
    to_read = [index for index in new if read or sizes[index] < 0]
    names_to_read = names.take(pa.array(to_read, pa.int64())).to_pylist()
    contents = zip(to_read, _in_threads(partial(_digest, root), names_to_read), strict=True)
    values = {index: f"{sizes[index]} bytes" for index in new} | dict(contents)
    errors = {index: value for index, value in values.items() if not isinstance(value, str)}
    digests = files["digest"].to_pylist()
    for index, value in values.items():
        digests[index] = None if index in errors else value
    sizes[[*errors]] = -1
    table = pa.table([names, sizes, stamps, pa.array(digests)], _KNOWN_COLUMNS)
    if (are_many or read) and (len(errors) < len(new) or folders != known_files.folders):
        _KnownFiles(table, folders).save(root, read, known_files)
    return FileDigests(table["digest"].combine_chunks(), sizes, errors)


class _Look(NamedTuple):
    size: int  # bytes; -1 for a file that cannot be reached
    stamp: int  # the sum of its times, in nanoseconds


def _look(root: Path, name: bytes) -> _Look:
    try:
        status = os.stat(b"%b/%b" % (os.fsencode(root), name))  # noqa: PTH116 - twice as fast
    except (OSError, ValueError):  # ValueError: a null character in the name
        return _Look(-1, 0)
    # No program can set the time of a change, but some file systems have none.
    return _Look(status.st_size, status.st_mtime_ns + status.st_ctime_ns)


def _digest(root: Path, name: bytes) -> str | OSError | ValueError:
    """Return the digest of a file, or why it has none."""
    try:
        return file_digest(root / os.fsdecode(name))
    except (OSError, ValueError) as error:
        return error


def file_digest(path: Path) -> str:
    """Return the digest of a file's content; of more than `MAX_READ_BYTES`, its size and times."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe might block, and a device might not end
        raise ValueError("it is not a regular file")
    if status.st_size > MAX_READ_BYTES:
        return f"{status.st_size} bytes, {status.st_mtime_ns + status.st_ctime_ns}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _in_threads(call: Callable[[bytes], Result], names: Sequence[bytes]) -> list[Result]:
    """Call a function that waits for a disk with each name."""
    chunks = [names[start : start + CHUNK_FILES] for start in range(0, len(names), CHUNK_FILES)]
    if len(chunks) < 2:
        return [*map(call, names)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [*chain.from_iterable(pool.map(lambda chunk: [*map(call, chunk)], chunks))]


@dataclass(frozen=True)
class _KnownFiles:
    """The files of a folder, and its folders, as they were when they were last looked at."""

    table: pa.Table = field(default_factory=_KNOWN_COLUMNS.empty_table)
    folders: Mapping[str, int] = field(default_factory=dict)  # the sum of their times

    @classmethod
    def load(cls, root: Path, read: bool) -> Self:
        if file := find_kept(cls._name(root, read)):
            with suppress(OSError, ValueError):  # it is damaged
                table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
                return cls(table, json.loads(table.schema.metadata[b"folders"]))
        return cls()

    def save(self, root: Path, read: bool, earlier: Self) -> None:
        """Write these files, and other ones that are known from earlier."""
        is_here = pc.is_in(earlier.table["name"], value_set=self.table["name"])
        table = pa.concat_tables([self.table, earlier.table.filter(pc.invert(is_here))])
        table = table.replace_schema_metadata({"folders": json.dumps(self.folders)})
        content = io.BytesIO()
        with pa.ipc.new_file(content, table.schema) as writer:
            writer.write_table(table)
        file = default_cache() / self._name(root, read)
        with suppress(OSError):  # a cache may be read-only
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(file, content.getvalue())

    @staticmethod
    def _name(root: Path, read: bool) -> Path:
        digest = hashlib.sha256(os.fsencode(f"{root}\n{read}")).hexdigest()[:NUM_ADDRESS_DIGITS]
        return Path(FILES_FOLDER, f"{root.name}-{digest}.arrow".lstrip("-."))

    def take(self, names: pa.Array) -> pa.Table:
        """Return the rows of files, with size -2 if nothing is known."""
        column = self.table["name"].combine_chunks()
        table = self.table
        if not names.equals(column):
            table = table.take(pc.index_in(names, value_set=column))
            table = table.set_column(1, "size", table["size"].fill_null(-2))
            table = table.set_column(2, "stamp", table["stamp"].fill_null(0))
        return table

    def is_as_it_was(self, root: Path) -> bool:
        """Return whether the times of the folders, and those of a sample of files, are the same."""
        if not self.folders or any(
            _look(root, os.fsencode(name)).stamp != stamp for name, stamp in self.folders.items()
        ):
            return False
        rows = np.linspace(0, len(self.table) - 1, min(len(self.table), NUM_SAMPLED_FILES))
        sample = self.table.take(pa.array(rows.astype(np.int64))).to_pylist()
        looks = _in_threads(partial(_look, root), [file["name"] for file in sample])
        return looks == [(file["size"], file["stamp"]) for file in sample]

"""Write files that are never half written, and read untrusted files within bounds.

A file is complete even after a kill or a power cut: it is written under another name and renamed.
"""

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from uuid import uuid4

from sbkit.base.errors import CODE_FAULTS, SbkitError, translate

RUN_YAML = "hyperparams.yaml"  # in a run folder
RUN_CONFIG_FILE = "run_config.json"  # the configuration that a run began with
TEMPORARY_NAMES = ".sbkit-*.tmp"  # of unfinished files and folders
LOCK_FILE = ".lock"  # in a folder that one process locks; it stays there
LOCK_PREFIX = ".lock-"  # how the name of a task's lock file begins
# An unfinished folder that has not changed for this long was left behind by a killed process.
ABANDONED_SECONDS = 86_400
# Errors of fsync on file systems that have it for files only, or not at all: CIFS, 9p, some FUSE.
FSYNC_REFUSALS = (
    *(errno.EINVAL, errno.ENOTSUP, errno.ENOSYS),
    *(errno.EBADF, errno.EISDIR, errno.EPERM, errno.EACCES),
)
MAX_TEXT_BYTES = 1 << 31  # the largest text, such as a table of Kaldi
MAX_FILE_BYTES = 1 << 25  # the largest file of a bundle or a run, except for these suffixes
MAX_BYTES_BY_SUFFIX = {
    **{".yaml": 1 << 20, ".jsonl": 1 << 31},
    **{".ckpt": 1 << 36, ".safetensors": 1 << 36},
}
LFS_VERSION = b"version https://git-lfs.github.com/spec/"  # the first line of a pointer
PLAIN_NAME = re.compile(r"(?!\.\.?\Z)[^/\\\0]+")  # of a file, without a folder
POINTER_FAULT = "is a pointer of git-lfs, not the file. Run git lfs pull in its repository."
Fields = TypeVar("Fields")  # a dataclass


@contextmanager
def os_errors_name(path: Path) -> Iterator[None]:
    """Name ``path`` in every numbered OSError raised inside: a full disk's error names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # gzip's errors have only a text, which a file name would replace
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_run(folder: Path) -> bool:
    """Return whether a path is an existing run folder."""
    return (folder / RUN_YAML).is_file() and (folder / RUN_CONFIG_FILE).is_file()


def temporary_path(path: Path) -> Path:
    """Return a new name beside a path, for a file or folder that is renamed to it once whole.

    The name is short, because the path's own may have 255 bytes. It is random, because threads, and
    machines with a shared folder, may have one process id.
    """
    return path.with_name(TEMPORARY_NAMES.replace("*", uuid4().hex[:12]))


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left, unchanged for a day."""
    for path in folder.glob(TEMPORARY_NAMES):
        try:
            changes = [inner.stat(follow_symlinks=False).st_mtime for inner in path.rglob("*")]
            changes.append(path.stat(follow_symlinks=False).st_mtime)
        except FileNotFoundError:  # removed in the meantime
            continue
        if time.time() - max(changes) > ABANDONED_SECONDS:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_bytes_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, or its blocks one by one, under another name, then rename it.

    A reader sees the whole old file or the whole new one. If writing fails, the old file stays.
    """
    temporary = temporary_path(path)
    with os_errors_name(path):
        try:
            with temporary.open("wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8, completely or not at all."""
    write_bytes_atomically(path, text.encode())


def write_lines_atomically(path: Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8 with a line end after each, completely or not at all."""
    write_bytes_atomically(path, (f"{line}\n".encode() for line in lines))


def require_writable(folder: Path, *, option: str) -> None:
    """Create a folder and check that it can be written to; the SbkitError names the option."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fault = f"`{option}`: {folder} cannot be written to ({error.strerror})."
        raise SbkitError(fault) from error


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def size_and_mtime(path: Path | str) -> tuple[int, int]:
    """Return a file's size (bytes) and modification time (ns), zeros if it cannot be reached."""
    try:
        status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns


def to_json(value: object, *, indent: int | None = None) -> str:
    """Encode plain data, dataclasses and numbers of NumPy or torch as JSON; NaN becomes null."""
    encode = partial(json.dumps, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        return encode(value)
    except (TypeError, ValueError):  # a dataclass, a number of NumPy or torch, or one not finite
        return encode(_to_plain(value))


def _to_plain(value: Any) -> object:
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or torch
        value = value.item()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def from_plain(cls: type[Fields], values: Any) -> Fields:
    """Make a dataclass from its fields as read from JSON; a ValueError names a wrong field."""
    if not isinstance(values, dict):
        raise ValueError(f"it is {repr(values)[:40]}, which has no fields")
    class_: Any = cls
    names = {field.name for field in fields(class_)}
    required = {f.name for f in fields(class_) if f.default is f.default_factory is MISSING}
    for name in sorted((required - values.keys()) | (values.keys() - names)):
        raise ValueError(f"its {name} is {'unknown' if name in values else 'missing'}")
    types = get_type_hints(cls)
    return cls(**{name: _convert(name, value, types[name]) for name, value in values.items()})


def _convert(name: str, value: Any, field_type: Any) -> Any:
    """Convert a value read from JSON to the type of the named field."""
    for option in get_args(field_type) if isinstance(field_type, UnionType) else [field_type]:
        container, inner = get_origin(option), get_args(option)
        if option in (Any, type(value)) or (option is float and type(value) is int):
            return value
        if isinstance(value, dict) and container in (Mapping, dict):
            return {key: _convert(name, item, inner[1]) for key, item in value.items()}
        if isinstance(value, list) and container in (Sequence, tuple):
            items = [_convert(name, item, inner[0]) for item in value]
            return tuple(items) if container is tuple else items
    raise ValueError(f"its {name} is {repr(value)[:40]}, which has the wrong type")


def fsync(descriptor: int) -> None:
    """Wait until an open file or folder is on the disk, if its file system offers that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in FSYNC_REFUSALS:
            raise


def fsync_path(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk, like `fsync`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until a folder and all its files are on the disk, like `fsync`."""
    for path in [*folder.rglob("*"), folder]:
        fsync_path(path)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; rename it to ``folder`` at the end, or remove it on an error.

    If another process has finished ``folder`` first, its result stays and ours is removed. Folders
    that killed processes left are removed when nothing in them has changed for a day.
    An OSError, for example from a full disk, names ``folder``.
    """
    temporary = temporary_path(folder)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        fault = f"{folder.parent} cannot be written to ({error.strerror})."
        raise SbkitError(f"{fault} For prepared data, set SBKIT_CACHE.") from error
    remove_abandoned(folder.parent)
    try:
        yield temporary
        try:
            if not folder.is_dir():
                temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
                raise
    except OSError as error:
        if error.errno is not None:  # as in `os_errors_name`
            error.filename = error.filename or str(folder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_lock(folder: Path) -> int:
    """Open a folder's lock file; on NFS, locking the folder itself excludes no other machine."""
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)


def try_lock(descriptor: int, *, if_unsupported: bool = True) -> bool:
    """Try to lock a file that is open for writing; return whether that succeeded.

    if_unsupported: what to return if the file system does not support locks, as on some clusters.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = isinstance(error, BlockingIOError) or error.errno == errno.EACCES
        return False if is_held else if_unsupported
    return True


@contextmanager
def task_lock(
    folder: Path, task: str, *, wait: bool, on_wait: Callable[[str], None] = lambda holder: None
) -> Iterator[bool]:
    """Hold the lock of a named task; yield whether this process holds it.

    On a disk without locks, every process holds the lock.

    wait: wait while another process holds the lock; otherwise yield False.
    on_wait: called before waiting, with the name of the process that holds the lock.
    """
    file = folder / f"{LOCK_PREFIX}{hashlib.sha256(task.encode()).hexdigest()[:16]}"
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        is_held = try_lock(lock)
        if not is_held and wait:
            on_wait(os.pread(lock, 200, 0).decode(errors="replace") or "another process")
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_held = True
        # A process may open the file just before the holder removes it, and then lock a file that
        # nobody else can find.
        if not is_held or _is_at(file, lock):
            break
        os.close(lock)
    if is_held:
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    try:
        yield is_held
        if is_held:
            file.unlink(missing_ok=True)
    finally:
        if is_held:  # a process that was forked meanwhile may have the file open
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _is_at(path: Path, descriptor: int) -> bool:
    """Check whether an open file is the one at ``path``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def read_regular(
    path: Path, *, max_bytes: int | None = None, subject: str, follow_links: bool = False
) -> bytes:
    """Read a regular file; refuse a pipe or a device, because reading it might never end.

    max_bytes: by default the limit in MAX_BYTES_BY_SUFFIX.
    subject: the subject of an error's first sentence, such as "The vocabulary".
    """
    try:
        require_regular(path, max_bytes=max_bytes, subject=subject, follow_links=follow_links)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise _unreadable(subject, path, getattr(error, "strerror", None) or str(error)) from error


def read_file(path: Path) -> bytes:
    """Read a file of a run folder, which may be a stranger's; raise as `require_regular` does."""
    require_regular(path, subject=f"A run's {path.name}")
    return path.read_bytes()


def require_regular(
    path: Path,
    *,
    max_bytes: int | None = None,
    subject: str = "A file of a run",
    follow_links: bool = True,
) -> None:
    """Raise SbkitError for a file that `read_regular` refuses, OSError for a missing one."""
    status = path.stat(follow_symlinks=follow_links)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(subject, path, "it is not a regular file")
    max_bytes = max_bytes or MAX_BYTES_BY_SUFFIX.get(path.suffix, MAX_FILE_BYTES)
    if status.st_size > max_bytes:
        raise SbkitError(
            f"{subject} must have at most {max_bytes} bytes, but {path} has {status.st_size}."
        )


def plain_name(name: object, *, file: Path | str) -> str:
    """Return the name that a file gives another one beside it; raise SbkitError for a path.

    A stranger's list of files must not lead out of its folder.
    """
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise SbkitError(
            f"{file} must name files in its own folder, but names {repr(name)[:100]}. Do not use "
            "this folder."
        )
    return name


def pointer_sentence(file: Path | str) -> str | None:
    """Return an error for a pointer of git-lfs, as in a clone without it; None for other files."""
    with suppress(OSError, ValueError), Path(file).open("rb") as content:
        if content.read(len(LFS_VERSION)) == LFS_VERSION:
            return f"{file} {POINTER_FAULT}"
    return None


def parsing_errors(
    file: Path | str, requirement: str, *, fix: str, is_json: bool = False
) -> AbstractContextManager[None]:
    """Turn a parser's exceptions into SbkitError: "FILE must REQUIREMENT, but ... FIX".

    is_json: whether fields are read from JSON, where a TypeError means a value of another type.
    """

    def describe(error: Exception) -> str:
        # Quote only the first sentence: torch's errors continue with bad advice.
        reason = " ".join(str(error).partition("\n")[0].partition(". ")[0].split())
        name = type(error).__name__
        fault = f"{file} must {requirement}, but cannot be read ({name}: {reason}). {fix}"
        return pointer_sentence(file) or fault

    return translate(Exception, SbkitError, describe, unchanged=() if is_json else CODE_FAULTS)


def read_text_lines(path: Path, *, subject: str) -> list[str]:
    """Read the lines of a UTF-8 file, which may be a link; raise SbkitError like `read_regular`."""
    content = read_regular(path, max_bytes=MAX_TEXT_BYTES, subject=subject, follow_links=True)
    with parsing_errors(f"{subject} ({path})", "be UTF-8", fix="Save it as UTF-8."):
        return content.decode("utf-8-sig").rstrip("\n").split("\n")


def iter_raw_lines(path: Path, *, subject: str) -> Iterator[bytes]:
    """Yield the lines of a file, with their ends; a file named .gz is decompressed."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(subject, path, getattr(error, "strerror", None) or str(error)) from error


def _unreadable(subject: str, path: Path, reason: str) -> SbkitError:
    return SbkitError(f"{subject} must be readable, but {path} is not ({reason}).")

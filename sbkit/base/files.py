"""Write files that are whole whenever they are there, and read those of others within bounds.

A file is whole even after a kill or a power cut: it is written beside, and renamed.
"""

import errno
import fcntl
import glob
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from sbkit.base.errors import SbkitError

ABANDONED = 86_400  # seconds, after which a folder that was begun is taken for a killed process's


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError raised inside: that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file that is whole whenever it is there: beside, and renamed.

    A reader sees the old file or the new, never a part; after an error the old one.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    write_bytes_atomically(path, text.encode())


def require_writable(folder: Path, *, option: str) -> None:
    """Check early that a folder can be made and written to.

    Raises SbkitError where it cannot; the sentence names ``option``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SbkitError(
            f"`{option}` must name a folder to write to, but {folder} is none "
            f"({error.strerror}). Choose another one."
        ) from error


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest of the folders above it that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def to_json(value: object, *, indent: int | None = None) -> str:
    """Encode numbers, text and lists as valid JSON, in which NaN and infinity become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> object:
    if getattr(value, "ndim", None) == 0:  # a number of NumPy's or torch's
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def fsync_tree(folder: Path) -> None:
    """Wait until all that a folder holds, and the folder itself, is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` to fill; rename it at the end, remove it on an error.

    Where ``folder`` is there already, because another process finished it first, it stays and ours
    is removed. What killed processes left of the same folder is removed after a day.

    Raises:
        SbkitError: nothing can be written there.
        OSError: not all can be written there; it names ``folder``.
    """
    beside = folder.with_name(f".{folder.name}.{uuid4().hex[:12]}.tmp")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise SbkitError(
            f"{folder.parent} must be a folder to write to, but is not: {error.strerror}. Choose "
            "another one; SBKIT_CACHE names that of prepared data."
        ) from error
    for other in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        with suppress(FileNotFoundError):  # finished by now
            if time.time() - other.stat().st_mtime > ABANDONED:
                shutil.rmtree(other, ignore_errors=True)
    try:
        yield beside
        if not folder.is_dir():
            beside.rename(folder)
    except OSError as error:
        if error.errno is not None:  # gzip's is none of the disk's, and its text would be gone
            error.filename = error.filename or str(folder)
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def try_lock(descriptor: int, *, without_locks: bool = True) -> bool:
    """Lock an open file or folder for this process, and return whether nobody else has it.

    ``without_locks`` is returned where the disk has no locks, as some of clusters have none.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def share_lock(descriptor: int) -> None:
    """Share the lock of an open file or folder with others, once nobody has it alone.

    A disk without locks is left as it is.
    """
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def read_regular(path: Path, *, largest: int, what: str) -> bytes:
    """Read a file whole, never a pipe that blocks, a device that does not end, or a link.

    ``what`` begins the sentence of an error; ``largest`` is in bytes.
    Raises SbkitError when it is missing, not a regular file, or larger.
    """
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = path.read_bytes() if facts.st_size <= largest else b""
    except (OSError, ValueError) as error:
        raise _unreadable(what, path, error) from error
    if facts.st_size > largest:
        raise SbkitError(
            f"{what} must be a file of at most {largest} bytes, but {path} has {facts.st_size}. It "
            "is not what its name says; restore it."
        )
    return content


@contextmanager
def reading(file: Path | str, *, must: str, fix: str) -> Iterator[None]:
    """Raise SbkitError for a file that its reader cannot make sense of, whatever error that is.

    must, fix: what it must be, and what to do, where it is not.
    """
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:
        told = str(error).partition("\n")[0].partition(". ")[0]  # torch's go on to bad advice
        what = " ".join(told.split())
        raise SbkitError(
            f"{file} must {must}, but cannot be read ({type(error).__name__}: {what}). {fix}"
        ) from error


def read_text(path: Path, *, largest: int, what: str) -> list[str]:
    """Read the lines of a text in UTF-8, of a file or of what a link leads to, as `read_regular`.

    Raises SbkitError where that does, and for another encoding.
    """
    content = read_regular(path.resolve(), largest=largest, what=what)
    try:
        return content.decode("utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise SbkitError(
            f"{what} must be UTF-8, but {path} is not ({error}). Save it as UTF-8."
        ) from error


def read_lines(path: Path, *, what: str) -> Iterator[bytes]:
    """Yield the lines of a file; raises SbkitError, which ``what`` begins, where it cannot."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise _unreadable(what, path, error) from error


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> SbkitError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return SbkitError(
        f"{what} must be readable, but {path} is not ({why}). Check its name and its rights."
    )

"""Read a file of somebody else's: once, a regular file, and no more than it may hold."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sbkit.base.errors import SbkitError

LONGEST_LINE = 1 << 24  # bytes
KINDS = {
    **{stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"},
}


def read_regular(path: Path, *, largest: int, what: str) -> bytes:
    """Read a file whole, never a pipe that blocks, a device that does not end, or a link.

    ``what`` begins the sentence of a refusal; ``largest`` is in bytes.
    Raises SbkitError when it is missing, not a regular file, or larger.
    """
    try:
        kind = path.lstat().st_mode
        if not stat.S_ISREG(kind):
            other = KINDS.get(stat.S_IFMT(kind), "something else")
            raise SbkitError(
                f"{what} must be a file, but {path} is {other}. Put the file itself there."
            )
        with _opened(path, os.O_NOFOLLOW) as file:  # what is looked at now is what is read
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > largest else file.read(size)
    except (OSError, ValueError) as error:
        raise _unreadable(what, path, error) from error
    except MemoryError as error:
        raise SbkitError(
            f"{what} must fit into memory, but {path} has {size} bytes. Use a larger machine."
        ) from error
    if size > largest:
        raise SbkitError(
            f"{what} must be a file of at most {largest} bytes, but {path} has {size}. It is not "
            "what its name says; restore it."
        )
    return content


def real_path(path: Path) -> Path:
    """Follow all links but one to itself, for which `Path.resolve` raises RuntimeError."""
    return Path(os.path.realpath(path))


def read_text(path: Path, *, largest: int, what: str) -> list[str]:
    """Read the lines of a text in UTF-8, of a file or of what a link leads to, as `read_regular`.

    Raises SbkitError where that does, and for another encoding.
    """
    content = read_regular(real_path(path), largest=largest, what=what)
    try:
        return content.decode("utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise SbkitError(
            f"{what} must be UTF-8, but {path} is not ({error}). Save it as UTF-8."
        ) from error


def read_lines(path: Path, *, what: str) -> Iterator[bytes]:
    """Yield the lines of a file, or of what a link leads to, and no pipe or device.

    ``what`` begins the sentence of a refusal. Raises SbkitError when it is none, or has a line of
    more than LONGEST_LINE bytes, as a file of zeros has.
    """
    try:
        with _opened(path) as file:
            while line := file.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE:
                    raise SbkitError(
                        f"{what} must have lines of less than {LONGEST_LINE} bytes, but {path} has "
                        "a longer one. Cut it into lines."
                    )
                yield line
    except (OSError, ValueError) as error:
        raise _unreadable(what, path, error) from error


@contextmanager
def _opened(path: Path, *flags: int) -> Iterator[BinaryIO]:
    descriptor = os.open(path, sum(flags, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> SbkitError:
    why = error.strerror if isinstance(error, OSError) else "its name is no name of a file"
    return SbkitError(
        f"{what} must be readable, but {path} is not ({why}). Check its name and its rights."
    )

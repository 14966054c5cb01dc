"""Detect hostile files that run code, move the cursor, or cause a traceback."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable

ESCAPE = "\x1b[2J\x1b[H"
# Audit events of Python that reading data must not raise.
EXECUTION_EVENTS = (
    *("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"),
    *("socket.connect", "socket.getaddrinfo", "urllib.Request", "webbrowser.open"),
)
MAX_SECONDS, MAX_GROWTH_BYTES = 120, 6 << 30  # of reading data
_events: list[str] | None = None


def _hang(*_: object) -> None:
    raise TimeoutError(f"it was not refused in {MAX_SECONDS} s")


def _note(event: str, details: tuple[Any, ...]) -> None:
    if _events is not None and event in EXECUTION_EVENTS:
        _events.append(event)


sys.addaudithook(_note)  # for as long as the process lives
signal.signal(signal.SIGALRM, _hang)


@contextmanager
def watched(canary: Path) -> Iterator[None]:
    """Fail if the block runs a command, connects, creates ``canary``, hangs or fills memory."""
    global _events
    _events = events = []
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MAX_GROWTH_BYTES, limits[1]))
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _events = None
    assert not events and not canary.exists()


def refused(read: Callable[[], object], canary: Path) -> str:
    """Read a hostile file, and return the error that refuses it."""
    with watched(canary), pytest.raises(SbkitError) as error:
        read()
    message = str(error.value)
    assert message.strip() and printable(message) == message
    return message


def _replace(make: Callable[[Path], Any], file: Path) -> None:
    file.unlink()
    make(file)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _sparse(file: Path) -> None:
    with file.open("wb") as content:
        content.truncate(1 << 40)


# Ways to damage or replace a file.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "pipe": partial(_replace, os.mkfifo),
    "link to /dev/zero": partial(_replace, lambda file: file.symlink_to("/dev/zero")),
    "folder": partial(_replace, Path.mkdir),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "a flipped bit": flip,
    "a terabyte": _sparse,
}

"""Commands in processes of their own, forked from one that has imported everything.

A fresh interpreter spends seconds on imports before it comes to what a test is about. Nothing but
imports (tests/imported.py) has happened in the process that these are forked from, so they are as
new as a fresh one.
How a command itself starts, and what torchrun does, is for tests that start fresh ones.
"""

import atexit
import os
import runpy
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import chdir
from multiprocessing import get_context
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.imported"])


class Process:
    """``python WORDS``: a script, ``-m MODULE`` or ``-c CODE``, and its arguments.

    What has the name of something of `subprocess.Popen` is like it.
    """

    def __init__(self, words: Sequence[object], *, cwd: Path = ROOT, **environment: object) -> None:
        self.args = [str(word) for word in words]
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for each in self._streams:
            weakref.finalize(self, os.close, each)
        written = [f"/proc/{os.getpid()}/fd/{each}" for each in self._streams]
        own = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        self._process = CONTEXT.Process(target=_become, args=(self.args, cwd, own, written))
        with chdir(ROOT):  # where the first of all finds what it imports
            self._process.start()
        self.kill, self.terminate = self._process.kill, self._process.terminate

    @property
    def pid(self) -> int:
        return int(self._process.ident or 0)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.written()

    def written(self) -> tuple[str, str]:
        """Return what it has written so far."""
        out, error = (os.pread(each, os.fstat(each).st_size, 0).decode() for each in self._streams)
        return out, error


def _become(
    words: list[str], cwd: Path, environment: Mapping[str, str], written: Sequence[str]
) -> None:
    """Go on as a command, in the process that was forked for it."""
    for stream, file in enumerate(written, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    kind, *arguments = words
    try:
        if kind == "-m":
            sys.path.insert(0, str(cwd))
            sys.argv = arguments
            if not hasattr(sys.modules.get(arguments[0]), "__path__"):  # of a package it is a part
                sys.modules.pop(arguments[0], None)  # as if nothing had imported it
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path.insert(0, "")
            code, *sys.argv = arguments
            sys.argv.insert(0, "-c")
            exec(code, {"__name__": "__main__"})
        else:
            sys.path.insert(0, str(Path(kind).absolute().parent))
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without


def run(
    words: Sequence[object], *, ranks: int = 1, timeout: float = 240, **more: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, on several ranks if need be.

    As under torchrun, the others are asked to leave when one has failed. Gives the code of one that
    failed first, and what each has written; the first rank has the last word.
    """
    port = _free_port()
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(ranks)
    ]
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    started = [
        Process(words, **more, **({**place, **sizes} if ranks > 1 else {})) for place in places
    ]
    try:
        code = _wait_for(started, time.monotonic() + timeout)
    finally:
        for each in started:
            each.kill()
    written = [each.communicate() for each in reversed(started)]
    out, error = ("".join(each) for each in zip(*written, strict=True))
    return subprocess.CompletedProcess(words, code, out, error)


def _wait_for(started: Sequence[Process], end: float) -> int:
    failed = 0
    while None in (codes := [each.poll() for each in started]):
        if not failed and any(codes):
            failed = next(filter(None, codes))
            for each in started:
                each.terminate()
        assert time.monotonic() < end, [each.args for each in started]
        time.sleep(0.01)
    return failed or next(filter(None, codes), 0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

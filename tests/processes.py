"""Commands in processes forked from one that has imported everything.

A fresh interpreter spends seconds on imports. The parent of these processes has only imported
modules (tests/imported.py), so they behave like fresh ones. Tests of how a command starts, and of
torchrun, start fresh interpreters instead.
"""

import atexit
import os
import runpy
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import TypeVar

import torch

ROOT = Path(__file__).parents[1]
Result = TypeVar("Result")
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.imported"])


def run_fresh(
    code: str, *words: object, cwd: Path = ROOT, **environment: object
) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has imported nothing."""
    command = [sys.executable, "-c", code, *map(str, words)]
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables)


def in_fork(work: Callable[[], Result], *, daemon: bool = False) -> Result:
    """Return the result of a function in a fork of this process, or raise its error."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(work())
        except Exception as error:
            sender.send(error)

    process = context.Process(target=run, daemon=daemon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: it may hang
        process.start()
    try:
        assert receiver.poll(60), "It hangs."
        result: Result | Exception = receiver.recv()
        process.join(60)
        assert process.exitcode == 0, "It does not end."
    finally:
        process.kill()
        process.join()
    if isinstance(result, Exception):
        raise result
    return result


class Process:
    """Run ``python WORDS``: a script, ``-m MODULE`` or ``-c CODE``, with its arguments.

    Its methods and attributes work like those of `subprocess.Popen` with the same names.
    """

    def __init__(self, words: Sequence[object], *, cwd: Path = ROOT, **environment: object) -> None:
        self.args = [str(word) for word in words]
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for stream in self._streams:
            weakref.finalize(self, os.close, stream)
        files = [f"/proc/{os.getpid()}/fd/{stream}" for stream in self._streams]
        variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        self._process = CONTEXT.Process(
            target=_run_command, args=(self.args, cwd, variables, files)
        )
        with chdir(ROOT):  # so that the fork server can import tests.imported
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
        return self.output()

    def output(self) -> tuple[str, str]:
        out, error = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in self._streams)
        return out, error


def _run_command(
    words: list[str], cwd: Path, environment: Mapping[str, str], files: Sequence[str]
) -> None:
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    # A fresh interpreter forks the workers of its loaders. The fork server makes this process start
    # them by a fork server of its own, which would import everything again.
    set_start_method(None, force=True)
    kind, *arguments = words
    try:
        if kind == "-m":
            sys.path.insert(0, str(cwd))
            sys.argv = arguments
            if not hasattr(sys.modules.get(arguments[0]), "__path__"):  # a module, not a package
                sys.modules.pop(arguments[0], None)  # runpy warns if it was imported
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
        atexit._run_exitfuncs()  # multiprocessing exits without them


def run(
    words: Sequence[object],
    *,
    ranks: int = 1,
    last_words: Sequence[object] | None = None,
    timeout: float = 240,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end on one or several ranks.

    As under torchrun, the other ranks are terminated when one fails. Returns the exit code of the
    first failure, and the output of all ranks, with rank 0 last.

    last_words: the command of the last rank, if it differs.
    """
    port = free_port()
    rank_variables = [
        {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(ranks)
    ]
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    commands = [*[words] * (ranks - 1), words if last_words is None else last_words]
    processes = [
        Process(command, **options, **({**variables, **sizes} if ranks > 1 else {}))
        for command, variables in zip(commands, rank_variables, strict=True)
    ]
    try:
        code = _wait_for(processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
    outputs = [process.communicate() for process in reversed(processes)]
    out, error = ("".join(texts) for texts in zip(*outputs, strict=True))
    return subprocess.CompletedProcess(words, code, out, error)


def _wait_for(processes: Sequence[Process], deadline: float) -> int:
    first_failure = 0
    while None in (codes := [process.poll() for process in processes]):
        if not first_failure and any(codes):
            first_failure = next(filter(None, codes))
            for process in processes:
                process.terminate()
        assert time.monotonic() < deadline, [process.args for process in processes]
        time.sleep(0.01)
    return first_failure or next(filter(None, codes), 0)


def read_quietly(file: Path) -> str:
    """Read a file of /proc; return an empty text if the process or thread has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    """Return a port of localhost that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

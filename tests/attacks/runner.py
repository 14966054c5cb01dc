"""Run one attack in a process of its own, and see what it does.

The process is forked from one that has imported everything; what it may take of memory and time is
limited. Python's audit events tell of every command, connection and pickled name, also of those
that leave no file behind.
"""

import contextlib
import gc
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.process import exit_code
from sbkit.base.text import printable
from sbkit.cli import run
from tests.attacks.archives import COMMANDS as OF_ARCHIVES
from tests.attacks.case import Case, Place
from tests.attacks.inputs import COMMANDS as OF_INPUTS
from tests.attacks.resumes import COMMANDS as OF_RESUMES
from tests.attacks.resumes import make_resumable
from tests.attacks.tables import COMMANDS as OF_TABLES
from tests.inference.bundles import make_bundle

COMMANDS = {**OF_ARCHIVES, **OF_INPUTS, **OF_RESUMES, **OF_TABLES}
SECONDS = 20.0
MEMORY = 3 << 30  # bytes of addresses beyond what the imports take
RESIDENT = 1 << 30  # bytes in memory beyond that
# Events that nothing here has a reason to raise.
EXECUTED = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen",
            "pty.spawn", "socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request",
            "pickle.find_class", "ctypes.dlopen", "code.__new__", "webbrowser.open")  # fmt: skip
SHOWN = 300  # characters; more than a pipe holds would block the child
REFUSED, HARMLESS, ACCEPTED = "refused", "accepted as harmless", "accepted"
GOOD = (REFUSED, HARMLESS)
# Packages of which a command may import more than `prepare` did, also before the fork.
TRUSTED = frozenset(("sbkit", "recipes", "torch", "speechbrain", "datasets", "pyarrow", "pandas",
                     "numpy", "scipy", "tensorboard", "jinja2", "onnxruntime", "kaldifst",
                     "kaldi_decoder", "rapidfuzz", "num2words", "rich", "sympy"))  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What an attack came to: refused or harmless, or else what went wrong."""

    kind: str
    detail: str = ""


def prepare(folder: Path) -> Place:
    """Make what every attack spoils a copy of: a bundle, its run, a clip and a trained run."""
    healthy = Place(folder / "healthy")
    make_bundle(healthy.folder)
    noise = np.random.default_rng(0).integers(-3000, 3000, 8000).astype(np.int16)
    soundfile.write(healthy.clip, noise, 16_000)
    torch.set_num_threads(1)
    make_resumable(healthy.folder)
    run(healthy.transcribe())  # what is imported late is imported before the first fork
    gc.collect()
    gc.freeze()  # a child's collector would touch, and so copy, all of it
    return healthy


def attack(case: Case, healthy: Place, folder: Path) -> Outcome:
    """Spoil a copy, give the command in a child, and look at how it ends."""
    shutil.copytree(healthy.folder, folder)
    place = Place(folder)
    place.mine.mkdir()
    (place.mine / "kept.txt").write_text("kept")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(case, place, writing)
    os.close(writing)
    status, peak = _wait(child)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    events, outcome, imported = (
        pickle.loads(told) if told and status is not None else ([], None, [])
    )
    outcome = _judge(case, place, status, events, outcome)
    shutil.rmtree(folder, ignore_errors=True)
    if outcome.kind in GOOD and (peak - before) * 1024 > RESIDENT:
        return Outcome("memory", f"{(peak - before) >> 10} MB")
    if outcome.kind in GOOD:
        _import_also(imported)
    return outcome


def _import_also(names: Sequence[str]) -> None:
    """Import what a command needed, so that later ones find it there: most of their time."""
    for name in names:
        if name.partition(".")[0] in TRUSTED:
            with contextlib.suppress(Exception):
                import_module(name)


def _judge(
    case: Case, place: Place, status: int | None, events: Sequence[str], outcome: Outcome | None
) -> Outcome:
    if place.canary.exists() or events:
        return Outcome("EXECUTED", ", ".join(events) or "the canary was touched")
    if status is None:
        return Outcome("hang", f"longer than {SECONDS} s")
    if outcome is None:
        return Outcome("crash", f"status {status}")
    kept = {each.name: each.read_bytes() for each in place.mine.iterdir()}
    if kept != {"kept.txt": b"kept"}:
        return Outcome("LOSS", f"{list(kept.items())!r:.200}")
    if outcome.kind == ACCEPTED:
        return Outcome(HARMLESS) if case.harmless else outcome
    return outcome


def _wait(child: int) -> tuple[int | None, int]:
    """Wait for a child, no longer than it may take: its status, and its peak in kB.

    Where other processes wait for the same cores, that is longer.
    """
    start = time.monotonic()
    while time.monotonic() < start + SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)):
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2].ru_maxrss


def _in_child(case: Case, place: Place, writing: int) -> None:
    """Give the command, and tell how it ended; never returns."""
    events: list[str] = []
    before = frozenset(sys.modules)
    try:
        arguments = case.prepare(place)
        _limit()
        sys.addaudithook(partial(_note, events))
        outcome = _give(arguments)
        if any(Path(each).is_relative_to(place.folder) for each in sys.path):
            events.append("a folder of the case is searched for modules")
    except BaseException:
        outcome = Outcome("broken case", traceback.format_exc()[-400:])
    with os.fdopen(writing, "wb") as answer:
        answer.write(pickle.dumps((events, outcome, sorted(sys.modules.keys() - before))))
    os._exit(0)


def _note(events: list[str], event: str, details: tuple[Any, ...]) -> None:
    """Note an event that nothing has a reason to raise, but jinja2 that names a template's line."""
    of_template = event == "code.__new__" and str(details[1]).endswith(".j2")
    if event in EXECUTED and not of_template and event not in events:
        events.append(event)


def _limit() -> None:
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + MEMORY, addresses + MEMORY))


def _give(arguments: list[str]) -> Outcome:
    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = _run(arguments)
    except SbkitError as sentence:
        return _said(str(sentence))
    except OSError as error:  # as `run_main` has it
        if exit_code(error) == BAD_INPUT:
            return _said(printable(str(error)))
        return Outcome("traceback", traceback.format_exc()[-500:])
    except MemoryError:
        return Outcome("memory", traceback.format_exc()[-300:])
    except Exception:
        return Outcome("traceback", traceback.format_exc()[-500:])
    both = out.getvalue() + error.getvalue()
    if code == 0 and not _moves_cursor(both):
        return Outcome(ACCEPTED, out.getvalue()[:100])
    return _said(both)


def _run(arguments: list[str]) -> int:
    if arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1])
        return 0
    return run(arguments)


def _said(text: str) -> Outcome:
    """Look at a refusal: it is there, and it cannot move the cursor."""
    if not text.strip() or _moves_cursor(text):
        return Outcome("forged", repr(text[:SHOWN]))
    return Outcome(REFUSED, text[:SHOWN])


def _moves_cursor(text: str) -> bool:
    plain = text.replace("\n", "").replace("\t", "")
    return printable(plain) != plain

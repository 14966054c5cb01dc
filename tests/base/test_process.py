"""A command exits with a code that says why, and with a sentence if the user can fix it."""

import errno
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED, INTERRUPTED, DataError
from sbkit.base.process import exit_code, run_main
from sbkit.base.stores import is_temporary

LOST_WORKER = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
WORKER = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback:\n  line\n{}\n"
LOST_RANK = RuntimeError("[gloo/transport/tcp/pair.cc:538] Read [::1]: Connection reset by peer")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, ASKED_TO_STOP)]
)
def test_signal_exits_with_its_code(number: signal.Signals, code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: os.kill(os.getpid(), number))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "raised", [RecursionError("a bug"), ConnectionRefusedError(errno.ECONNREFUSED, "refused")]
)
def test_error_that_user_cannot_fix_is_printed_with_its_calls(
    raised: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: _raise(raised))
    assert caught.value.code == FAILED
    assert "in _raise\n    raise error\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "printed"),
    [
        (OSError(errno.ENOSPC, "No space left", "/x"), "/x cannot be read or written"),
        (FileNotFoundError(errno.ENOENT, "gone", "/x"), "(gone). Check it"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/'"),
            "Set TMPDIR",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many files are open"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "(ulimit -v, ulimit"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "The system refused memory or threads"),
        (OSError(WORKER.format("OSError: [Errno 24] Too many open files")), "(ulimit -n), or"),
        (DataError(WORKER.format("sbkit.base.errors.DataError: No clip.")), "No clip.\n"),
        (FileNotFoundError(WORKER.format("[Errno 2] No such file: '/x'")), "No such file: '/x')"),
        (RuntimeError("received 0 items of ancdata"), "Too many files are open"),
        (ImportError("/torchaudio/lib/x.so: failed to map segment"), "refused memory"),
        (MemoryError(), "refused memory or threads (MemoryError). Free some"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to\nA"), "Tried to). Free some memory"),
        (LOST_RANK, "resume from the last checkpoint"),
        (LOST_WORKER, "A worker that loads data is killed by signal: Killed. "),
        # A name in an error cannot move the cursor.
        (DataError("\x1b[2J\x9b2J\u202e\udcff.\nTake"), r"\x1b[2J\x9b2J\u202e\udcff.\nTake"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_of_machine_becomes_sentence_and_code(
    raised: Exception, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: _raise(raised))
    code = FAILED if raised in (LOST_RANK, LOST_WORKER) or is_temporary(raised) else BAD_INPUT
    assert caught.value.code == exit_code(raised) == code
    error = capsys.readouterr().err
    assert printed in error
    assert error.count("\n") == 1


def _raise(error: Exception) -> NoReturn:
    raise error

"""A command that is interrupted leaves with the code of that, whatever fails then."""

import errno
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED, INTERRUPTED, SbkitError
from sbkit.base.exit import exit_code, run_main


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, ASKED_TO_STOP)]
)
def test_an_import_that_swallows_a_signal_and_fails_was_asked_to_leave(
    number: signal.Signals, code: int
) -> None:
    def command() -> int:
        try:
            os.kill(os.getpid(), number)
        except (KeyboardInterrupt, SystemExit):
            raise RecursionError("as numpy does where its import was broken off") from None
        return 0

    with pytest.raises(SystemExit) as left:
        run_main(command)
    assert left.value.code == code


def test_an_error_without_an_interrupt_is_raised() -> None:
    def command() -> int:
        raise RecursionError("a bug")

    with pytest.raises(RecursionError):
        run_main(command)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OSError(errno.EIO, "Input/output error", "/x"), "/x must be a place to read and write"),
        (FileNotFoundError(errno.ENOENT, "gone", "/x"), "Put back what was moved or removed"),
        (OSError(errno.ELOOP, "a loop of links", "/x"), "Move away what stands there"),
        (OSError(errno.EMFILE, "Too many open files"), "Allow more open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Memory and threads must suffice"),
        (MemoryError(), "the system refused some (MemoryError)"),
        (RuntimeError("can't start new thread"), "raise the limits (ulimit -v, ulimit -u)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to\nA"),
            "Tried to). Free memory, a GPU",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_machine_refuses_is_a_sentence(
    raised: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise raised

    with pytest.raises(SystemExit) as left:
        run_main(command)
    assert left.value.code == exit_code(raised) == BAD_INPUT
    assert said in capsys.readouterr().err


def test_a_rank_that_is_lost_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Read [::1]: Connection reset by peer")

    with pytest.raises(SystemExit) as left:
        run_main(command)
    assert left.value.code == FAILED
    assert "The same command goes on from the last checkpoint" in capsys.readouterr().err


def test_no_name_in_an_error_moves_the_cursor() -> None:
    error = SbkitError("It must be one, but \x1b[2J\x9b2J\u202eno \udcff is two.\nTake one.")
    assert str(error) == "It must be one, but \\x1b[2J\\x9b2J\\u202eno \\udcff is two.\\nTake one."

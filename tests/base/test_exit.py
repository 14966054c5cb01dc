"""A command that is interrupted leaves with the code of that, whatever fails then."""

import os
import signal
from collections.abc import Iterator

import pytest

from sbkit.base.errors import INTERRUPTED, SbkitError
from sbkit.base.exit import run_main


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_an_import_that_swallows_an_interrupt_and_fails_is_an_interruption() -> None:
    def command() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("as numpy does where its import was broken off") from None
        return 0

    with pytest.raises(SystemExit) as left:
        run_main(command)
    assert left.value.code == INTERRUPTED


def test_an_error_without_an_interrupt_is_raised() -> None:
    def command() -> int:
        raise RecursionError("a bug")

    with pytest.raises(RecursionError):
        run_main(command)


def test_no_name_in_an_error_moves_the_cursor() -> None:
    error = SbkitError("It must be one, but \x1b[2J\x9b2J\u202eno \udcff is two.\nTake one.")
    assert str(error) == "It must be one, but \\x1b[2J\\x9b2J\\u202eno \\udcff is two.\\nTake one."

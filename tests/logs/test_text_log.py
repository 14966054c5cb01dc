"""What a run says is kept in its folder, whatever becomes of the terminal."""

import re
import warnings
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.logs.log import EpochFigures, log, quiet
from sbkit.logs.progress import Progress
from sbkit.logs.text_log import TextLog


def kept(folder: Path) -> list[str]:
    """Return the lines without their times."""
    lines = (folder / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    return [line[20:] for line in lines]


def test_what_is_said_printed_and_warned_of_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (1, 2):
        with pytest.warns(UserWarning), TextLog(tmp_path, title=f"call {call}") as text_log:
            log("before the folder is taken")
            text_log.open()
            with quiet():
                log("what nobody hears")
            log("two\nlines \x1b[2J")
            warnings.warn("be careful", stacklevel=1)
            Progress(total_epochs=3, total_steps=9).epoch(
                EpochFigures(epoch=1, step=3, loss=2.0, rtfx=99.6)
            )
        log("after it")
    once = [
        "before the folder is taken",
        *("two", r"lines \x1b[2J"),
        "warning: UserWarning: be careful",
        "epoch 1/3 step 3 loss 2.000 100 RTFx",
    ]
    assert kept(tmp_path) == ["call 1", *once, "call 2", *once]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_run_that_is_refused_and_another_rank_leave_no_line(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SbkitError, match="no"), TextLog(tmp_path, title="call") as text_log:
        log("a note")
        if rank == "1":
            text_log.open()
        raise SbkitError("no")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (SbkitError("The disk must have room."), "error: The disk must have room."),
        (SystemExit(75), "ended with exit code 75"),
        (KeyboardInterrupt(), "ended by Ctrl-C"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_the_last_line_says_why_it_ended(error: BaseException, last: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), TextLog(tmp_path, title="call") as text_log:
        text_log.open()
        raise error
    assert kept(tmp_path)[-1] == last

"""A command shows messages, a run writes them into its folder, and a library does neither."""

import logging
import re
import warnings
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError, StopRequestedError
from sbkit.logs.handlers import ScreenHandler, TextLog, log_to_screen, quiet
from sbkit.logs.progress import TrainingProgress
from sbkit.logs.run_log import EpochFigures
from tests import processes

logger = logging.getLogger("sbkit.test")

HOST = """
import io, logging, sys
import sbkit.train.brain, sbkit.tasks.asr.predict, sbkit.serve.middleware
assert not logging.getLogger().handlers and not logging.getLogger("sbkit").handlers
logger = logging.getLogger("sbkit.train.brain")
logger.info("nobody asked for this")
logging.getLogger("sbkit").addHandler(logging.StreamHandler(stream := io.StringIO()))
logging.getLogger("sbkit").setLevel(logging.INFO)
logger.info("routed")
logging.getLogger("sbkit").setLevel(logging.CRITICAL)
logger.warning("silenced")
assert stream.getvalue() == "routed\\n", stream.getvalue()
"""


@pytest.mark.slow
def test_import_prints_nothing_and_host_routes_and_silences_messages() -> None:
    process = processes.run(["-c", HOST])
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize("to_stderr", [False, True])
def test_screen_gets_messages_of_first_rank_and_warnings_of_other_packages(
    to_stderr: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = logging.makeLogRecord({"name": "package", "pathname": pytest.__file__})
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with log_to_screen(to_stderr=to_stderr):
            logger.info("two\nlines \x1b[2J")
            logger.debug("details")
            for level in (logging.INFO, logging.WARNING):
                installed.levelno, installed.msg = level, f"level {level} of a package"
                logging.getLogger("package").handle(installed)
    printed = capsys.readouterr()
    message, warning = "two\nlines \\x1b[2J\n", "level 30 of a package\n"
    assert printed.out == ("" if to_stderr else message)
    assert printed.err == (message if to_stderr else "") + warning


def test_bad_log_call_of_library_does_not_end_command(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"name": "library", "msg": "%d frames", "args": ("no",), "levelno": logging.WARNING}
    ScreenHandler(to_stderr=False).handle(logging.makeLogRecord(record))
    assert "--- Logging error ---" in capsys.readouterr().err


def logged_lines(folder: Path) -> list[str]:
    """Return the lines of the text log without their times."""
    lines = (folder / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    return [line[20:] for line in lines]


@pytest.mark.filterwarnings("always")
def test_text_log_keeps_messages_progress_and_warnings(tmp_path: Path) -> None:
    for call in (1, 2):
        with log_to_screen(), TextLog(tmp_path, title=f"call {call}") as text_log:
            logger.info("before the folder is taken")
            text_log.open()
            with quiet():
                logger.info("dropped")
            logger.info("two\nlines \x1b[2J")
            logger.info("")
            warnings.warn("be careful", stacklevel=1)
            TrainingProgress(total_epochs=3, total_steps=9).report_epoch(
                EpochFigures(epoch=1, step=3, loss=2.0, rtfx=99.6)
            )
        logger.info("after it")
    lines = logged_lines(tmp_path)
    assert lines[:4] == ["call 1", "before the folder is taken", "two", r"lines \x1b[2J"]
    assert lines[4] == ""
    assert lines[5].endswith("UserWarning: be careful")
    assert lines[7] == "epoch 1/3 step 3 loss 2.000 100 RTFx"
    assert lines[8:] == ["call 2", *lines[1:8]]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_refused_run_and_second_rank_leave_no_text_log(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SbkitError, match="no"), TextLog(tmp_path, title="call") as text_log:
        logger.info("a note")
        if rank == "1":
            text_log.open()
        raise SbkitError("no")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (SbkitError("The disk must have room."), "error: The disk must have room."),
        (StopRequestedError("Stopped at step 3."), "ended with exit code 75"),
        (KeyboardInterrupt(), "ended by Ctrl-C"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_last_line_says_why_run_ended(error: BaseException, last_line: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), TextLog(tmp_path, title="call") as text_log:
        text_log.open()
        raise error
    assert logged_lines(tmp_path)[-1] == last_line


def test_full_disk_loses_only_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    with log_to_screen(), TextLog(tmp_path, title="call") as text_log:
        text_log.open()
        logger.info("on the screen")
    assert capsys.readouterr() == ("on the screen\n", "")

"""The command `sbkit transcribe --live`: text as it comes, partial and final."""

import argparse
import json
import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import TextIO

from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable_json
from sbkit.commands.transcribe import TEXT, running
from sbkit.live.recognizer import LiveRecognizer
from sbkit.live.session import Event, Final, Partial, Session
from sbkit.live.sources import live_blocks

CLEAR = "\r\033[K"  # of a terminal: to the beginning of the line, which is erased


def transcribe_live(options: argparse.Namespace) -> int:
    """Transcribe one source as it comes; return the exit code.

    Final text goes to standard output, text so far to standard error; as JSON, all events go to
    standard output, one a line.

    Raises:
        SbkitError: the bundle or the source cannot be used, or the options do not fit.
    """
    _check_options(options)
    with LiveRecognizer.load(options.bundle, **running(options)) as recognizer:
        if not options.quiet:
            print(f"running on {recognizer.effective}", file=sys.stderr)
        session = Session(recognizer, detector=options.detector)
        show = Display(options.format == "json", options.quiet)
        (source,) = options.files
        rate, pace = recognizer.sample_rate, options.pace or 0.0
        for block in live_blocks(source, rate, raw_rate=options.raw_rate, pace=pace):
            show(session.push(block))
        show(session.finish())
    return 0


def _check_options(options: argparse.Namespace) -> None:
    strange = [f"--{name}" for name in ("out", "errors") if getattr(options, name) is not None]
    if len(options.files) != 1 or strange or options.format not in (*TEXT, "json"):
        raise SbkitError(
            "`--live` must have one FILE, - or mic, and --format text or json, but has "
            f"{len(options.files)}, {options.format}{''.join(f' and {x}' for x in strange)}. "
            "Correct that, or leave out --live."
        )


class Display:
    """Print events: on a terminal, text so far on one line that changes."""

    def __init__(self, as_json: bool, quiet: bool, partial: TextIO | None = None) -> None:
        self._as_json, self._quiet = as_json, quiet
        self._partial = sys.stderr if partial is None else partial
        self._clear = CLEAR if self._partial.isatty() else ""

    def __call__(self, events: Iterable[Event]) -> None:
        """Print events as they come."""
        for event in events:
            if self._as_json:
                line = json.dumps(event.plain(), ensure_ascii=False)
                print(printable_json(line), flush=True)
            elif isinstance(event, Final):
                print(end=self._clear, file=self._partial, flush=True)
                print(event.text, flush=True)
            elif isinstance(event, Partial) and not self._quiet:
                shown, end = event.text, "\n"
                if self._clear:  # of a longer line only the last row would be erased
                    shown, end = f"{CLEAR}{shown[1 - get_terminal_size().columns :]}", ""
                print(shown, end=end, file=self._partial, flush=True)

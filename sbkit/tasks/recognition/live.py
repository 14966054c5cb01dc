"""The command `sbkit transcribe --live`: text as it is spoken, partial and final."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import TextIO

from sbkit.base.errors import ConfigError
from sbkit.base.messages import printable_json
from sbkit.tasks.detection.predict import open_detector
from sbkit.tasks.recognition.audio_input import audio_blocks
from sbkit.tasks.recognition.recordings import recognizer_options
from sbkit.tasks.recognition.session import Event, Final, Partial, Session, StreamingRecognizer

CLEAR_LINE = "\r\033[K"  # of a terminal: go to the beginning of the line, and erase it


def transcribe_live(options: Namespace) -> int:
    """Transcribe one source while it plays; return the exit code.

    Final text goes to standard output, partial text to standard error. As JSON, all events go to
    standard output, one per line.
    """
    names = ("out", "errors", "channel", "part")
    unsupported = [f"--{name}" for name in names if getattr(options, name) is not None]
    if len(options.files) != 1 or unsupported or options.format not in ("text", "json"):
        raise ConfigError(
            "`--live` takes one FILE, - or mic, and --format text or json, but was given "
            f"{len(options.files)} with {' and '.join([options.format, *unsupported])}."
        )
    with StreamingRecognizer.load(options.bundle, **recognizer_options(options)) as recognizer:
        if not options.quiet:
            print(f"running on {recognizer.effective}", file=sys.stderr)
        session = Session(recognizer, detector=open_detector(options))
        show = Display(options.format == "json", options.quiet)
        (source,) = options.files
        rate = recognizer.sample_rate
        pace = options.pace or 0.0
        for block in audio_blocks(source, rate, raw_rate=options.raw_rate, pace=pace):
            show(session.push(block))
        show(session.finish())
    return 0


class Display:
    """Print events as they arrive: on a terminal, partial text on one line that changes."""

    def __init__(self, as_json: bool, quiet: bool, partial: TextIO | None = None) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._partial = sys.stderr if partial is None else partial
        self._clear = CLEAR_LINE if self._partial.isatty() else ""

    def __call__(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._as_json:
                line = json.dumps(event.plain(), ensure_ascii=False)
                print(printable_json(line), flush=True)
            elif isinstance(event, Final):
                print(end=self._clear, file=self._partial, flush=True)
                print(event.text, flush=True)
            elif isinstance(event, Partial) and not self._quiet:
                text = event.text
                end = "\n"
                if self._clear:  # it erases only one row, so the text must not be longer
                    text = f"{CLEAR_LINE}{text[1 - get_terminal_size().columns :]}"
                    end = ""
                print(text, end=end, file=self._partial, flush=True)

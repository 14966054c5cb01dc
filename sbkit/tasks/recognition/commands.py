"""The command `sbkit transcribe`: from audio files to text.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sbkit.base.errors import FILES_FAILED, ConfigError, SbkitError
from sbkit.base.messages import printable, printable_json
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import Share

if TYPE_CHECKING:
    from sbkit.tasks.recognition.predict import Transcript
    from sbkit.tasks.recognition.results import Results

TIMED_FORMATS = ("srt", "vtt", "tsv")  # a file for each recording


def add_commands(parser: Parser) -> None:
    """Add `transcribe`."""
    groups = "model files runtime decoding vad quiet import share"
    add = parser.add_command(
        "transcribe", transcribe, "transcribe audio files", groups, opens_bundle=True
    )
    add("--format", choices=("text", "json", *TIMED_FORMATS), default="text")
    add("--out", metavar="DIR", type=Path, help="write one file per recording there")
    again = "transcribe all files again, and overwrite what is in DIR"
    add("--again", action="store_true", help=again)
    channel = "the channel to transcribe, counted from 0 (default: all are mixed)"
    add("--channel", metavar="N", type=int, help=channel)
    live = "print the text of one FILE, - or mic (a microphone) while it is spoken"
    add("--live", action="store_true", help=live)
    add("--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time")


def transcribe(options: Namespace) -> int:
    """Transcribe files or one source while it plays, and return the exit code."""
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live.")
    if options.live:
        from sbkit.tasks.recognition.live import transcribe_live

        return transcribe_live(options)
    from sbkit.tasks.recognition.recordings import find_audio, open_transcriber, show_seconds
    from sbkit.tasks.recognition.results import Results

    file = options.errors  # is opened early: if it cannot be written, nothing is read
    with (
        find_audio(options.files, options.raw_rate) as names,
        nullcontext() if file is None else file.open("w", encoding="utf-8") as errors,
        ExitStack() as stack,
    ):
        if options.out is None and len(names) > 1 and options.format in TIMED_FORMATS:
            fault = f"--format {options.format} prints one recording, not {len(names)}."
            raise ConfigError(f"{fault} Pass --out DIR.")
        share = (options.share or Share()).of([*names])
        results = None
        due: Mapping[Path, SbkitError | None] = dict.fromkeys(share)
        if options.out is not None:
            results = Results(options, names)
            due = results.due(share)
        ready = [file for file, error in due.items() if error is None]
        transcripts: Iterable[Transcript | SbkitError] = ()
        if ready:
            times = options.format != "text"
            transcriber = stack.enter_context(open_transcriber(options, times=times))
            on_seconds = stack.enter_context(show_seconds("transcribing", ready))
            transcripts = transcriber.stream(ready, on_seconds=on_seconds, channel=options.channel)
        refused = ((file, error) for file, error in due.items() if error is not None)
        outcomes = chain(refused, zip(ready, transcripts, strict=True))
        return _write_results(options, share, results, outcomes, errors)


def _write_results(
    options: Namespace,
    files: Sequence[Path],
    results: "Results | None",
    outcomes: "Iterable[tuple[Path, Transcript | SbkitError]]",
    errors: TextIO | None,
) -> int:
    """Write the result of each file that is due, or print its error; return the exit code."""
    num_written = 0
    num_failed = 0
    for file, outcome in outcomes:
        try:
            if isinstance(outcome, SbkitError):
                raise outcome
            text = _to_text(outcome, options.format)
            if results is not None:
                results.write(file, f"{text}\n")
            elif options.format == "text" and (len(files) > 1 or options.share is not None):
                print(f"{printable(str(file))}\t{text}", flush=True)
            else:
                print(text, flush=True)
            num_written += 1
        except SbkitError as error:
            num_failed += 1
            print(error, file=sys.stderr)
            if errors is not None:
                line = json.dumps({"file": str(file), "error": str(error)}, ensure_ascii=False)
                print(printable_json(line), file=errors, flush=True)
    num_skipped = len(files) - num_written - num_failed
    if len(files) > 1 or num_skipped:
        line = f"{num_written} written, {num_failed} failed"
        if num_skipped:
            line += f", {num_skipped} skipped"
        if num_failed:
            place = "above" if errors is None else f"in {printable(str(options.errors))}"
            line += f"; the errors are {place}"
        print(line, file=sys.stderr)
    return FILES_FAILED if num_failed else 0


def _to_text(result: "Transcript", format: str) -> str:
    """Return a result in a format, without the last line end."""
    from sbkit.tasks.recognition.subtitles import to_srt, to_tsv, to_vtt

    if format == "json":
        return printable_json(json.dumps(result.plain(), ensure_ascii=False))
    if format in TIMED_FORMATS:
        return {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}[format](result.words)
    return str(result)

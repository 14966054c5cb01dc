"""The command `sbkit transcribe`: from audio files to text.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
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
    from sbkit.tasks.recognition.recordings import Recording
    from sbkit.tasks.recognition.results import PrintedResults

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
    from sbkit.tasks.recognition.results import PrintedResults, Results

    file = options.errors
    with (
        find_audio(options.files, options.raw_rate) as recordings,
        nullcontext() if file is None else file.open("w", encoding="utf-8") as errors,
        ExitStack() as stack,
    ):
        if options.out is None and len(recordings) > 1 and options.format in TIMED_FORMATS:
            fault = f"--format {options.format} prints one recording, not {len(recordings)}."
            raise ConfigError(f"{fault} Pass --out DIR.")
        share = (options.share or Share()).of(recordings)
        has_names = options.format == "text" and (len(share) > 1 or options.share is not None)
        results = PrintedResults(with_names=has_names)
        if options.out is not None:
            results = Results(options, recordings)  # of all shares, which may have the same folder
        reasons = {recording: results.reason(recording) for recording in share}
        due = [recording for recording in share if reasons[recording]]
        if len(due) < len(share) or {*reasons.values()} != {"new"}:
            counts = Counter(filter(None, reasons.values()))
            line = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            print(f"To transcribe: {line or 'none'}", file=sys.stderr)
        refusals = [(recording, results.refusal(recording)) for recording in due]
        refused = [(recording, error) for recording, error in refusals if error is not None]
        ready = [recording for recording, error in refusals if error is None]
        transcripts: Iterable[Transcript | SbkitError] = ()
        if ready:
            paths = [recording.path for recording in ready]
            times = options.format != "text"
            transcriber = stack.enter_context(open_transcriber(options, times=times))
            on_seconds = stack.enter_context(show_seconds("transcribing", paths))
            transcripts = transcriber.stream(paths, on_seconds=on_seconds, channel=options.channel)
        outcomes = chain(refused, zip(ready, transcripts, strict=True))
        return _write_results(options, share, results, outcomes, errors)


def _write_results(
    options: Namespace,
    files: Sequence["Recording"],
    results: "PrintedResults",
    outcomes: "Iterable[tuple[Recording, Transcript | SbkitError]]",
    errors: TextIO | None,
) -> int:
    """Write the result of each recording, or print its error; return the exit code."""
    num_written = 0
    num_failed = 0
    for recording, outcome in outcomes:
        try:
            if isinstance(outcome, SbkitError):
                raise outcome
            results.write(recording, _to_text(outcome, options.format))
            num_written += 1
        except SbkitError as error:
            num_failed += 1
            print(error, file=sys.stderr)
            if errors is not None:
                fault = {"file": str(recording.path), "error": str(error)}
                line = json.dumps(fault, ensure_ascii=False)
                print(printable_json(line), file=errors, flush=True)
    num_skipped = len(files) - num_written - num_failed
    if len(files) > 1 or num_skipped:
        line = f"{num_written} written, {num_failed} failed"
        line += f", {num_skipped} skipped" if num_skipped else ""
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

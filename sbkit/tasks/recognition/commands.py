"""The command `sbkit transcribe`: from audio files to text.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sbkit.base.errors import FILES_FAILED, ConfigError, SbkitError
from sbkit.base.files import require_writable, write_text_atomically
from sbkit.base.messages import printable, printable_json
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import Share

if TYPE_CHECKING:
    from sbkit.tasks.recognition.predict import Transcript

TIMED_FORMATS = ("srt", "vtt", "tsv")  # a file for each recording


def add_commands(parser: Parser) -> None:
    """Add `transcribe`."""
    groups = "model files runtime decoding vad quiet import part"
    add = parser.add_command(
        "transcribe", transcribe, "transcribe audio files", groups, opens_bundle=True
    )
    add("--format", choices=("text", "json", *TIMED_FORMATS), default="text")
    add("--out", metavar="DIR", type=Path, help="write one file per recording there")
    channel = "the channel to transcribe, counted from 0 (default: all are mixed)"
    add("--channel", metavar="N", type=int, help=channel)
    live = "print the text of one FILE, - or mic (a microphone) while it is spoken"
    add("--live", action="store_true", help=live)
    add("--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time")


def transcribe(options: Namespace) -> int:
    """Transcribe files or one source while it plays, and return the exit code.

    Raises SbkitError if the bundle cannot be used, or the options do not fit.
    """
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live. Add --live, or leave --pace out.")
    if options.live:
        from sbkit.tasks.recognition.live import transcribe_live

        return transcribe_live(options)
    from sbkit.tasks.recognition.recordings import find_audio, open_transcriber, show_seconds

    with find_audio(options.files, options.raw_rate) as files:
        _check_output(options, files)  # of all parts, which may share a folder
        share = (options.part or Share()).of(files)
        file = options.errors  # is opened early: if it cannot be written, nothing is read
        with (
            nullcontext() if file is None else file.open("w", encoding="utf-8") as errors,
            open_transcriber(options, times=options.format != "text") as transcriber,
            show_seconds("transcribing", share) as on_seconds,
        ):
            results = transcriber.stream(share, on_seconds=on_seconds, channel=options.channel)
            return _write_results(options, share, results, errors)


def _write_results(
    options: Namespace,
    files: Sequence[Path],
    results: "Iterable[Transcript | SbkitError]",
    errors: TextIO | None,
) -> int:
    """Write the result of each file, or print its error; return the exit code."""
    num_failed = 0
    for file, result in zip(files, results, strict=True):
        if not isinstance(result, SbkitError):
            _write(file, result, options, with_name=len(files) > 1 or options.part is not None)
            continue
        num_failed += 1
        print(result, file=sys.stderr)
        if errors is not None:
            line = json.dumps({"file": str(file), "error": str(result)}, ensure_ascii=False)
            print(printable_json(line), file=errors, flush=True)
    if len(files) > 1:
        line = f"{len(files) - num_failed} written, {num_failed} failed"
        if num_failed:
            place = "above" if errors is None else f"in {printable(str(options.errors))}"
            line += f"; the errors are {place}"
        print(line, file=sys.stderr)
    return FILES_FAILED if num_failed else 0


def _write(file: Path, result: "Transcript", options: Namespace, *, with_name: bool) -> None:
    """Print a result, after the name of its file if there are several, or write it."""
    from sbkit.tasks.recognition.subtitles import to_srt, to_tsv, to_vtt

    text = str(result)
    if options.format == "json":
        text = printable_json(json.dumps(result.plain(), ensure_ascii=False))
    elif options.format in TIMED_FORMATS:
        write = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}[options.format]
        text = write(result.words)
    elif with_name and options.out is None:
        text = f"{printable(str(file))}\t{text}"
    if options.out is None:
        print(text, flush=True)
    else:
        write_text_atomically(options.out / _output_name(file, options), text + "\n")


def _output_name(file: Path, options: Namespace) -> str:
    return f"{file.stem}.{'txt' if options.format == 'text' else options.format}"


def _check_output(options: Namespace, files: Sequence[Path]) -> None:
    """Check early that the result of each file can be written."""
    if options.out is not None:
        require_writable(options.out, option="--out")
        for name, count in Counter(_output_name(file, options) for file in files).items():
            if count > 1:
                raise ConfigError(
                    f"`--out` writes a file for each recording, but {count} of them would be "
                    f"{name}. Transcribe them one after the other, each with an --out of its own."
                )
    elif len(files) > 1 and options.format in TIMED_FORMATS:
        raise ConfigError(
            f"`--format {options.format}` prints one recording, but there are {len(files)}. Pass "
            "--out DIR, where each gets a file of its own."
        )

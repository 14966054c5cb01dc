"""The command `sbkit transcribe`: from audio files to text.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.
"""

import errno
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sbkit.base.checksums import read_checksums
from sbkit.base.errors import FILES_FAILED, ConfigError, DataError, SbkitError
from sbkit.base.files import require_writable, write_text_atomically
from sbkit.base.messages import printable, printable_json
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import Share

if TYPE_CHECKING:
    from sbkit.tasks.recognition.predict import Transcript

TIMED_FORMATS = ("srt", "vtt", "tsv")  # a file for each recording
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # not of one name alone


def add_commands(parser: Parser) -> None:
    """Add `transcribe`."""
    groups = "model files runtime decoding vad quiet import part"
    add = parser.add_command(
        "transcribe", transcribe, "transcribe audio files", groups, opens_bundle=True
    )
    add("--format", choices=("text", "json", *TIMED_FORMATS), default="text")
    add("--out", metavar="DIR", type=Path, help="write one file per recording there")
    again = "also transcribe files whose result in DIR is newer than they and the model are"
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

    with find_audio(options.files, options.raw_rate) as files:
        outputs = _output_files(options, files)  # of all parts, which may share a folder
        share = _unfinished(options, (options.part or Share()).of(files), outputs)
        if not share:
            return 0
        file = options.errors  # is opened early: if it cannot be written, nothing is read
        with (
            nullcontext() if file is None else file.open("w", encoding="utf-8") as errors,
            open_transcriber(options, times=options.format != "text") as transcriber,
            show_seconds("transcribing", share) as on_seconds,
        ):
            results = transcriber.stream(share, on_seconds=on_seconds, channel=options.channel)
            return _write_results(options, share, outputs, results, errors)


def _write_results(
    options: Namespace,
    files: Sequence[Path],
    outputs: Mapping[Path, Path],
    results: "Iterable[Transcript | SbkitError]",
    errors: TextIO | None,
) -> int:
    """Write the result of each file, or print its error; return the exit code."""
    num_failed = 0
    for file, result in zip(files, results, strict=True):
        try:
            if isinstance(result, SbkitError):
                raise result
            has_name = len(files) > 1 or options.part is not None
            _write(file, result, options.format, outputs.get(file), with_name=has_name)
        except SbkitError as error:
            num_failed += 1
            print(error, file=sys.stderr)
            if errors is not None:
                line = json.dumps({"file": str(file), "error": str(error)}, ensure_ascii=False)
                print(printable_json(line), file=errors, flush=True)
    if len(files) > 1:
        line = f"{len(files) - num_failed} written, {num_failed} failed"
        if num_failed:
            place = "above" if errors is None else f"in {printable(str(options.errors))}"
            line += f"; the errors are {place}"
        print(line, file=sys.stderr)
    return FILES_FAILED if num_failed else 0


def _write(
    file: Path, result: "Transcript", format: str, output: Path | None, *, with_name: bool
) -> None:
    """Write a result, or print it, after the name of its file if there are several.

    Raises SbkitError if it cannot be written there; OSError if nothing can, as on a full disk.
    """
    from sbkit.tasks.recognition.subtitles import to_srt, to_tsv, to_vtt

    text = str(result)
    if format == "json":
        text = printable_json(json.dumps(result.plain(), ensure_ascii=False))
    elif format in TIMED_FORMATS:
        text = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}[format](result.words)
    elif with_name and output is None:
        text = f"{printable(str(file))}\t{text}"
    if output is None:
        print(text, flush=True)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(output, text + "\n")
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        raise DataError(f"{output} cannot be written ({error.strerror}).") from error


def _output_files(options: Namespace, files: Sequence[Path]) -> dict[Path, Path]:
    """Return the file of each recording's result, below `--out`; none if results are printed."""
    if options.out is None:
        if len(files) > 1 and options.format in TIMED_FORMATS:
            raise ConfigError(
                f"--format {options.format} prints one recording, not {len(files)}. Pass --out DIR."
            )
        return {}
    require_writable(options.out, option="--out")
    paths = [Path(os.path.normpath(file.absolute())) for file in files]
    root = os.path.commonpath([path.parent for path in paths])
    paths = [path.relative_to(root) for path in paths]
    names = [path.stem for path in paths]
    if len({*names}) < len({*paths}):
        names = [str(path.with_suffix("")) for path in paths]
    if len({*names}) < len({*paths}):  # a.wav and a.mp3
        names = [*map(str, paths)]
    ending = "txt" if options.format == "text" else options.format
    outputs = [options.out / f"{name}.{ending}" for name in names]
    return dict(zip(files, outputs, strict=True))


def _unfinished(
    options: Namespace, files: Sequence[Path], outputs: Mapping[Path, Path]
) -> Sequence[Path]:
    """Return the files that have no result newer than they and the model, and count the others."""
    if options.again or not outputs:
        return files
    model = [options.bundle / name for name in read_checksums(options.bundle)]
    model_time = max((file.stat().st_mtime for file in model if file.exists()), default=math.inf)

    def is_finished(file: Path) -> bool:
        with suppress(OSError):  # one of them is missing, or the name is too long
            result_time = outputs[file].stat().st_mtime
            return outputs[file].is_file() and result_time > max(model_time, file.stat().st_mtime)
        return False

    unfinished = [file for file in files if not is_finished(file)]
    if num_skipped := len(files) - len(unfinished):
        line = f"{num_skipped} of {len(files)} skipped: results are newer than audio and model"
        print(f"{line}. --again transcribes all, as for other options.", file=sys.stderr)
    return unfinished

"""The command `sbkit transcribe`: its options, and what it prints.

Nothing is imported here that answering `--help` does not need.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.text import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from sbkit.inference.transcribe.audio_files import AudioFile
    from sbkit.inference.transcribe.transcriber import Transcript

TIMED = ("json", "srt", "vtt", "tsv")  # formats with the times of words
FORMATS = ("text", "txt", *TIMED)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `sbkit transcribe`."""
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="an exported folder")
    command.add_argument(
        "files", metavar="FILE", nargs="+", help="audio, folders, patterns, - for standard input"
    )
    command.add_argument("--format", choices=FORMATS, default="text")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="write a file for each there, instead of printing"
    )
    add_runtime(command)


def add_runtime(command: argparse.ArgumentParser) -> None:
    """Add the options for where and how a model runs."""
    command.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:N or auto (the default)"
    )
    command.add_argument("--runtime", choices=("torch", "onnx"), default="torch")
    command.add_argument("--precision", choices=("fp32", "bf16", "fp16", "int8"), default="fp32")
    command.add_argument(
        "--compile", choices=("default", "reduce-overhead"), help="compile the model first"
    )
    command.add_argument(
        "--on-recompile",
        choices=("error", "fallback"),
        default="error",
        help="for audio of other shapes than were compiled",
    )


def transcribe(options: argparse.Namespace) -> int:
    """Transcribe the files; one that fails does not stop the others. Return the exit code.

    Raises:
        SbkitError: the bundle cannot be used, or the options do not fit.
    """
    from sbkit.base.machine import usable_cores
    from sbkit.inference.transcribe.audio_files import find_audio
    from sbkit.inference.transcribe.transcriber import Transcriber

    # oneDNN keeps what it compiles for each shape of a batch, 70 kB, 1024 times; a batch needs four
    # of them, and in an hour hardly any shape comes twice: 60 MB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(16 * usable_cores()))
    with ExitStack() as stack:
        files = stack.enter_context(find_audio(options.files))
        out = _Writer(options, files)
        transcriber = stack.enter_context(
            Transcriber.load(
                options.bundle,
                device=options.device,
                runtime=options.runtime,
                precision=options.precision,
                compile=options.compile,
                on_recompile=options.on_recompile,
                decoder=options.decoder,
                hotwords=options.hotwords,
                times=options.format in TIMED,
                own=options.own,
            )
        )
        print(f"running on {transcriber.effective}", file=sys.stderr)
        on_seconds = stack.enter_context(_progress_bar(files))
        sources = (transcriber.file_source(each.path, name=each.name) for each in files)
        code = out.write_all(transcriber.stream(sources, on_seconds=on_seconds))
        if transcriber.fallbacks:
            print(f"batches that ran uncompiled: {transcriber.fallbacks}", file=sys.stderr)
        return code


class _Writer:
    """Print transcripts, or write each to a file of its own."""

    def __init__(self, options: argparse.Namespace, files: "list[AudioFile]") -> None:
        from sbkit.base.files import require_writable

        self._format: str = options.format
        self._out: Path | None = options.out
        self._many = len(files) > 1
        if self._out is None:
            if self._many and self._format in ("srt", "vtt", "tsv"):
                raise SbkitError(
                    f"A file of {self._format} must be of one recording, but there are "
                    f"{len(files)}. Pass --out DIR, where each has its own."
                )
            return
        names = [self._name(each.name) for each in files]
        if len({*names}) < len(names):
            raise SbkitError(
                "Files must have different names to be written to one folder, but two have the "
                "same. Transcribe them one after the other, each with an --out of its own."
            )
        require_writable(self._out, option="--out")

    def write_all(self, results: "Iterable[Transcript | SbkitError]") -> int:
        """Write what is found in each file, and the errors of those in which nothing is."""
        from sbkit.base.files import write_text_atomically

        code = 0
        for result in results:
            if isinstance(result, SbkitError):
                print(result, file=sys.stderr)
                code = BAD_INPUT
            elif self._out is None:
                print(self._text(result), flush=True)
            else:
                file = self._out / self._name(str(result.file))
                write_text_atomically(file, self._text(result) + "\n")
        return code

    def _name(self, source: str) -> str:
        stem = "stdin" if source == "-" else Path(source).stem
        return f"{stem}.{'txt' if self._format == 'text' else self._format}"

    def _text(self, result: "Transcript") -> str:
        from sbkit.inference.transcribe.subtitles import to_srt, to_tsv, to_vtt

        if self._format == "json":
            return printable_json(json.dumps(result.plain(), ensure_ascii=False))
        if self._format in ("srt", "vtt", "tsv"):
            write = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}[self._format]
            return write(result.words)
        named = self._many and self._out is None
        return f"{printable(str(result.file))}\t{result}" if named else str(result)


@contextmanager
def _progress_bar(files: "list[AudioFile]") -> "Iterator[Callable[[float], object] | None]":
    """Show how much of the audio is done, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from sbkit.audio.io import declared_seconds

    seconds = sum(declared_seconds(each.path) for each in files)
    columns = (
        TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what is piped away does not pass the terminal
        redirect_stderr=True,
    ) as progress:
        task = progress.add_task("", total=seconds)
        yield lambda done: progress.advance(task, done)

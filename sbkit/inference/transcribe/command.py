"""The command `sbkit transcribe`: the files that it reads, and what it prints."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress

from sbkit.audio.io import audio_below, declared_seconds
from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.files import require_writable, write_text_atomically
from sbkit.base.machine import usable_cores
from sbkit.base.text import printable, printable_json
from sbkit.inference.transcribe.subtitles import to_srt, to_tsv, to_vtt
from sbkit.inference.transcribe.transcriber import Transcriber, Transcript

STANDARD_INPUT = "-"
TEXT = ("text", "txt")  # two names of one format
OF_WORDS = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}  # each file is of one recording


def transcribe(options: argparse.Namespace) -> int:
    """Transcribe the files; one that is no audio does not stop the others. Return the exit code.

    Raises:
        SbkitError: the bundle cannot be used, or the options do not fit.
    """
    # oneDNN keeps what it compiles for each shape of a batch, 70 kB, 1024 times; a batch needs four
    # of them, and in an hour hardly any shape comes twice: 60 MB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(16 * usable_cores()))
    code = 0
    with ExitStack() as stack:
        files = stack.enter_context(find_audio(options.files))
        _check_output(options, files)
        transcriber = stack.enter_context(
            Transcriber.load(
                options.bundle,
                device=options.device,
                runtime=options.runtime,
                precision=options.precision,
                compile=options.compile,
                decoder=options.decoder,
                hotwords=options.hotwords,
                times=options.format not in TEXT,
                own=options.own,
            )
        )
        print(f"running on {transcriber.effective}", file=sys.stderr)
        on_seconds = stack.enter_context(_progress_bar(files))
        for result in transcriber.stream(files, on_seconds=on_seconds):
            if isinstance(result, SbkitError):
                print(result, file=sys.stderr)
                code = BAD_INPUT
            else:
                _write(result, options, named=len(files) > 1)
    return code


@contextmanager
def find_audio(arguments: Sequence[str]) -> Iterator[list[Path]]:
    """List the files that arguments name, in their order; a folder's and a pattern's are sorted.

    Folders are searched to any depth for files with the suffix of an audio format. Standard input
    is written to a file first, which is removed in the end, since audio cannot be read from a pipe.
    Missing files are listed too; reading them raises the error.

    Raises:
        SbkitError: a folder or a pattern has no audio.
    """
    found: list[Path] = []
    with ExitStack() as closing:
        for argument in arguments:
            path = Path(argument)
            if argument == STANDARD_INPUT:
                path = Path(closing.enter_context(TemporaryDirectory()), "stdin")
                with path.open("wb") as content:
                    shutil.copyfileobj(sys.stdin.buffer, content)
            below = [path]
            if path.is_dir():
                below = audio_below(path)
            elif has_magic(argument) and not path.exists():
                below = sorted(map(Path, glob(argument, recursive=True)))  # noqa: PTH207, that refuses **.wav
            if not below:
                raise SbkitError(
                    f"FILE must be audio, a folder or a pattern with some, but {argument} has none."
                    " Correct it."
                )
            found += below
        yield found


def _check_output(options: argparse.Namespace, files: Sequence[Path]) -> None:
    """Check early that what is written for each file has a place."""
    if options.out is not None:
        require_writable(options.out, option="--out")
        if len({file.stem for file in files}) < len(files):
            raise SbkitError(
                "Files must have different names to be written to one folder, but two have the "
                "same. Transcribe them one after the other, each with an --out of its own."
            )
    elif len(files) > 1 and options.format in OF_WORDS:
        raise SbkitError(
            f"A file of {options.format} must be of one recording, but there are {len(files)}. "
            "Pass --out DIR, where each has its own."
        )


def _write(transcript: Transcript, options: argparse.Namespace, *, named: bool) -> None:
    """Print a transcript, after the name of its file where there are several, or write it."""
    file, text = str(transcript.file), str(transcript)
    if options.format == "json":
        text = printable_json(json.dumps(transcript.plain(), ensure_ascii=False))
    elif options.format in OF_WORDS:
        text = OF_WORDS[options.format](transcript.words)
    elif named and options.out is None:
        text = f"{printable(file)}\t{text}"
    if options.out is None:
        print(text, flush=True)
    else:
        suffix = "txt" if options.format in TEXT else options.format
        write_text_atomically(options.out / f"{Path(file).stem}.{suffix}", text + "\n")


@contextmanager
def _progress_bar(files: Sequence[Path]) -> Iterator[Callable[[float], object]]:
    """Show how much of the audio is done, where standard error is a terminal."""
    # What is piped away does not pass the terminal.
    console, on_terminal = Console(stderr=True), sys.stdout.isatty()
    is_off = not console.is_terminal
    with Progress(
        console=console, transient=True, redirect_stdout=on_terminal, disable=is_off
    ) as progress:
        seconds = 0.0 if is_off else sum(map(declared_seconds, files))
        task = progress.add_task("", total=seconds)
        yield lambda done: progress.advance(task, done)

"""The recordings that a command reads, with their progress and their errors."""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import soundfile

from sbkit.audio.containers import AudioError
from sbkit.audio.decode import check_rate
from sbkit.audio.io import STANDARD, declared_seconds, find_audio_files, stream_audio
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.machine import usable_cores
from sbkit.logs.progress import progress_bar, shows_progress
from sbkit.runtime.runtimes import model_options
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.vad.predict import open_detector

INPUT_BLOCK_BYTES = 1 << 20  # of 16-bit samples that are copied at a time


@contextmanager
def find_audio(arguments: Sequence[str], raw_rate: int | None = None) -> Iterator[dict[Path, Path]]:
    """List the files that arguments name, in their order; folders and patterns are sorted.

    With each file, its path below the given folder or pattern is listed; else only its name.
    `find_audio_files` searches folders and patterns. Standard input is first written to a temporary
    file: readers seek, which a pipe cannot. Missing files are listed, too; the error is raised when
    they are read.

    raw_rate: the sample rate of standard input without a header.
    """
    if raw_rate is not None and str(STANDARD) not in arguments:
        raise ConfigError("`--raw-rate` describes standard input, but no FILE is -.")
    files: dict[Path, Path] = {}
    with ExitStack() as stack:
        for argument in arguments:
            path = Path(argument)
            if path == STANDARD:
                path = Path(stack.enter_context(TemporaryDirectory()), "stdin")
                _save_standard_input(path, raw_rate)
            parts = path.parts
            num_plain = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
            root = path.parent
            matches = [path]
            if path.is_dir():
                root = path
                matches = find_audio_files(path)
            elif num_plain < len(parts) and not path.exists():
                root = Path(*parts[:num_plain])
                matches = find_audio_files(root, parts[num_plain:])
            if not matches:
                raise DataError(f"{argument} has no audio files.")
            for file in matches:
                files.setdefault(file, file.relative_to(root))
        yield files


def _save_standard_input(file: Path, raw_rate: int | None) -> None:
    """Write standard input to a file."""
    if raw_rate is None:
        with file.open("wb") as content:
            shutil.copyfileobj(sys.stdin.buffer, content)
        try:
            next(stream_audio(file, block_seconds=0.1))
        except AudioError as error:
            if error.reason != "not audio":  # other errors are raised when it is read
                return
            raise DataError(
                "Standard input has no header of audio. For 16-bit samples, give --raw-rate HZ."
            ) from error
        return
    check_rate("`--raw-rate`", raw_rate)
    # The header of a WAV cannot hold the length of more than 4 GB.
    with soundfile.SoundFile(file, "w", raw_rate, 1, "PCM_16", format="W64") as audio:
        while block := sys.stdin.buffer.read(INPUT_BLOCK_BYTES):
            audio.buffer_write(block[: len(block) // 2 * 2], "int16")


def recognizer_options(options: Namespace) -> dict[str, Any]:
    """Return the options of a command that `Transcriber.load` takes."""
    names = ("decoder", "hotwords", "language")
    return {**model_options(options), **{name: getattr(options, name) for name in names}}


def open_transcriber(options: Namespace, *, times: bool) -> Transcriber:
    """Load the bundle as the options say, and print where its model runs."""
    # oneDNN caches 1,024 kernels, each for one shape and of 70 kB. A batch needs four of them, but
    # hardly any shape occurs twice in an hour of audio, so the cache would take 60 MB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(16 * usable_cores()))
    transcriber = Transcriber.load(
        options.bundle, **recognizer_options(options), times=times, detector=open_detector(options)
    )
    if not options.quiet:
        print(f"running on {transcriber.runs_on}", file=sys.stderr)
    return transcriber


def show_seconds(
    title: str, files: Sequence[Path]
) -> AbstractContextManager[Callable[[float], object]]:
    """Show how many seconds of audio are done; yield a function that adds to them."""
    seconds = sum(map(declared_seconds, files)) if shows_progress.get() else None
    return progress_bar(title, seconds)

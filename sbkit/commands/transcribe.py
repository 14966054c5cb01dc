"""The command `sbkit transcribe`: the files that it reads, and what it prints.

What is left of a file that failed is a sentence, a line of ``--errors`` and the exit code.

The command `sbkit classify`: from audio files to labels, with an exported bundle.

Legend: V labels.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import numpy as np
import soundfile

from sbkit.audio.io import AudioError, audio_below, check_rate, declared_seconds, stream_audio
from sbkit.base.errors import FILES_FAILED, SbkitError
from sbkit.base.files import require_writable, write_text_atomically
from sbkit.base.machine import usable_cores
from sbkit.base.messages import printable, printable_json
from sbkit.base.units import samples_to_seconds
from sbkit.logs.progress import shown
from sbkit.runtime.graph_model import OPTIONS
from sbkit.runtime.model import naming_audio
from sbkit.runtime.segments import Segmenter
from sbkit.runtime.subtitles import to_srt, to_tsv, to_vtt
from sbkit.runtime.transcriber import Transcriber, Transcript

if TYPE_CHECKING:
    from sbkit.runtime.torch_model import TorchBundle

Result = TypeVar("Result")

STANDARD_INPUT = "-"
RAW_BYTES = 1 << 20  # of 16-bit samples that are copied at a time
RUNNING = (*OPTIONS, "decoder", "hotwords")
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
    with ExitStack() as stack:
        files = stack.enter_context(find_audio(options.files, options.raw_rate))
        _check_output(options, files)
        errors = stack.enter_context(open_errors(options.errors))
        transcriber = stack.enter_context(
            Transcriber.load(
                options.bundle,
                times=options.format not in TEXT,
                detector=options.detector,
                **running(options),
            )
        )
        if not options.quiet:
            print(f"running on {transcriber.effective}", file=sys.stderr)
        bar = show_seconds("transcribing", files, quiet=options.quiet)
        on_seconds = stack.enter_context(bar)
        results = transcriber.stream(files, on_seconds=on_seconds)
        write = partial(_write, options=options, named=len(files) > 1)
        failed = write_each(files, results, write, errors)
    return conclude(files, failed, options.errors)


def running(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say of the model and its decoder, for `open_recognizer`."""
    return {name: getattr(options, name) for name in RUNNING}


def open_errors(file: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open what ``--errors`` names, early: without a place for it nothing is read."""
    return nullcontext() if file is None else file.open("w", encoding="utf-8")


def write_each(
    files: Sequence[Path],
    results: Iterable[Result | SbkitError],
    write: Callable[[Result], object],
    errors: TextIO | None,
) -> int:
    """Write the result of each file, or print its error; return how many failed."""
    failed = 0
    for file, result in zip(files, results, strict=True):
        if not isinstance(result, SbkitError):
            write(result)
            continue
        failed += 1
        print(result, file=sys.stderr)
        if errors is not None:
            line = json.dumps({"file": str(file), "error": str(result)}, ensure_ascii=False)
            print(printable_json(line), file=errors, flush=True)
    return failed


def conclude(files: Sequence[Path], failed: int, errors: Path | None) -> int:
    """Print how many files were written, where there are several; return the exit code."""
    if len(files) > 1:
        place = "above" if errors is None else f"in {printable(str(errors))}"
        where = f"; the errors are {place}" if failed else ""
        print(f"{len(files) - failed} written, {failed} failed{where}", file=sys.stderr)
    return FILES_FAILED if failed else 0


@contextmanager
def find_audio(arguments: Sequence[str], raw_rate: int | None = None) -> Iterator[list[Path]]:
    """List the files that arguments name, in their order; a folder's and a pattern's are sorted.

    Folders are searched to any depth for files with the suffix of an audio format. Standard input
    is written to a file first, which is removed in the end, since audio cannot be read from a pipe.
    Missing files are listed too; reading them raises the error. ``raw_rate`` is that of standard
    input, where it is samples without a header.

    Raises:
        SbkitError: a folder or a pattern has no audio, or standard input is none.
    """
    if raw_rate is not None and STANDARD_INPUT not in arguments:
        raise SbkitError(
            "`--raw-rate` must come with standard input, but no FILE is -. Pass -, or leave it out."
        )
    found: list[Path] = []
    with ExitStack() as closing:
        for argument in arguments:
            path = Path(argument)
            if argument == STANDARD_INPUT:
                path = Path(closing.enter_context(TemporaryDirectory()), "stdin")
                _save_standard_input(path, raw_rate)
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


def _save_standard_input(file: Path, raw_rate: int | None) -> None:
    """Write standard input to a file; raises SbkitError where that can be no audio."""
    if raw_rate is None:
        with file.open("wb") as content:
            shutil.copyfileobj(sys.stdin.buffer, content)
        try:
            next(stream_audio(file, block_seconds=0.1))
        except AudioError as error:
            if error.reason != "not audio":  # the others are the file's
                return
            raise SbkitError(
                "Standard input must be audio with a header, but is not recognized as any. Pipe "
                "WAV, or give --raw-rate HZ for samples of 16 bits (little-endian, mono)."
            ) from error
        return
    check_rate("`--raw-rate`", raw_rate)
    # A WAV of more than 4 GB cannot say its length.
    with soundfile.SoundFile(file, "w", raw_rate, 1, "PCM_16", format="W64") as audio:
        while block := sys.stdin.buffer.read(RAW_BYTES):
            audio.buffer_write(block[: len(block) // 2 * 2], "int16")


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


def show_seconds(
    title: str, files: Sequence[Path], *, quiet: bool
) -> AbstractContextManager[Callable[[float], object]]:
    """Show how many seconds of the audio are done; yields what is called with those since."""
    seconds = None if quiet else sum(map(declared_seconds, files))
    return shown(title, seconds, quiet=quiet)


SHORTEST = 20.0  # seconds of a piece: one sentence is too short for a label


@dataclass(frozen=True)
class Classification:
    """Which label a file has, and how probable it is to the model (0 to 1)."""

    file: Path
    label: str
    probability: float
    seconds: float

    def __str__(self) -> str:
        """Write the label and its probability."""
        return f"{self.label}\t{self.probability:.4f}"

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "file": str(self.file)}


def classify(options: argparse.Namespace) -> int:
    """Classify the files; one that is no audio does not stop the others. Return the exit code."""

    def write(found: Classification) -> None:
        text = f"{printable(str(found.file))}\t{found}" if len(files) > 1 else str(found)
        if options.format == "json":
            text = printable_json(json.dumps(found.plain(), ensure_ascii=False))
        print(text, flush=True)

    with (
        find_audio(options.files, options.raw_rate) as files,
        open_errors(options.errors) as errors,
        show_seconds("classifying", files, quiet=options.quiet) as on_seconds,
    ):
        results = classify_files(
            options.bundle, files, user_modules=options.user_modules, on_seconds=on_seconds
        )
        failed = write_each(files, results, write, errors)
    return conclude(files, failed, options.errors)


def classify_files(
    bundle: Path,
    files: Sequence[Path],
    *,
    user_modules: frozenset[str] = frozenset(),
    on_seconds: Callable[[float], object] = float,
) -> Iterator[Classification | SbkitError]:
    """Classify one file after the other; one that is no audio gives its error and no more.

    on_seconds: called with the seconds of audio that were classified since it was called last.
    """
    from sbkit.runtime.torch_model import load_bundle

    loaded = load_bundle(bundle, user_modules=user_modules)
    loaded.task.require_prediction("label", command="classify")
    for file in files:
        try:
            yield _classify(loaded, file, on_seconds)
        except SbkitError as error:
            yield error


def _classify(
    bundle: "TorchBundle", file: Path, on_seconds: Callable[[float], object]
) -> Classification:
    """Return the most probable label of the pieces of a file, each weighted by its length."""
    labels, rate = bundle.labels.names, bundle.config.sample_rate
    total, samples, seconds = np.zeros(len(labels)), 0, 0.0  # (V,)
    for piece in Segmenter(rate, min_seconds=SHORTEST).split(stream_audio(file, rate)):
        with naming_audio(file):
            (probabilities,) = bundle.classify([piece.samples])  # (V,)
        total += len(piece.samples) * probabilities
        samples += len(piece.samples)
        on_seconds(samples_to_seconds(len(piece.samples), rate))
        seconds = samples_to_seconds(piece.start + len(piece.samples), rate)
    best = int(total.argmax())
    return Classification(file, printable(labels[best]), float(total[best] / samples), seconds)

"""The commands `sbkit transcribe` and `sbkit classify`: from audio files to text, or to classes.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.

Legend: V classes.
"""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import soundfile

from sbkit.audio.containers import AudioError
from sbkit.audio.decode import check_rate
from sbkit.audio.io import declared_seconds, find_audio_files, stream_audio
from sbkit.base.errors import FILES_FAILED, ConfigError, DataError, SbkitError
from sbkit.base.files import require_writable, write_text_atomically
from sbkit.base.machine import usable_cores
from sbkit.base.messages import printable, printable_json
from sbkit.base.units import samples_to_seconds
from sbkit.logs.progress import progress_bar
from sbkit.runtime.model_thread import model_errors_as_bundle_errors
from sbkit.runtime.runtimes import model_options
from sbkit.runtime.segments import Segmenter
from sbkit.runtime.subtitles import to_srt, to_tsv, to_vtt
from sbkit.runtime.transcriber import Transcriber, Transcript
from sbkit.runtime.voice_detector import VoiceDetector

if TYPE_CHECKING:
    from sbkit.runtime.torch_model import TorchBundle

STANDARD_INPUT = "-"
COPY_BYTES = 1 << 20  # of 16-bit samples that are copied at a time
TEXT_FORMATS = ("text", "txt")  # two names of one format
TIMED_FORMATS = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv}  # a file for each recording
MIN_CLASSIFIED_SECONDS = 20.0  # of a segment: one sentence is too short to be classified


@dataclass(frozen=True)
class Classification:
    """The most probable class of a file, and its probability according to the model (0 to 1)."""

    file: Path
    label: str
    probability: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.label}\t{self.probability:.4f}"

    def plain(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        return {**asdict(self), "file": str(self.file)}


def transcribe(options: Namespace) -> int:
    """Transcribe the files, and return the exit code.

    Raises SbkitError if the bundle cannot be used, or the options do not fit.
    """
    with find_audio(options.files, options.raw_rate) as files:
        _check_output(options, files)
        times = options.format not in TEXT_FORMATS
        with (
            open_errors(options.errors) as errors,
            open_transcriber(options, times=times) as transcriber,
            show_seconds("transcribing", files, quiet=options.quiet) as on_seconds,
        ):
            results = transcriber.stream(files, on_seconds=on_seconds, channel=options.channel)
            return write_results(options, files, results, errors)


def open_transcriber(options: Namespace, *, times: bool) -> Transcriber:
    """Load the bundle as the options say, and print where its model runs."""
    # oneDNN caches 1,024 kernels, each for one shape and of 70 kB. A batch needs four of them, but
    # hardly any shape occurs twice in an hour of audio, so the cache would take 60 MB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(16 * usable_cores()))
    load = partial(Transcriber.load, options.bundle, **recognizer_options(options))
    transcriber = load(times=times, detector=open_detector(options))
    if not options.quiet:
        print(f"running on {transcriber.effective}", file=sys.stderr)
    return transcriber


def recognizer_options(options: Namespace) -> dict[str, Any]:
    """Return the options of `open_recognizer`."""
    return {**model_options(options), "decoder": options.decoder, "hotwords": options.hotwords}


def open_detector(options: Namespace) -> VoiceDetector | None:
    """Open the voice activity detector of ``--vad``."""
    if options.vad is None:
        return None
    return VoiceDetector.load(options.vad, device=options.device, runtime=options.runtime)


def open_errors(file: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open the file of ``--errors`` early: if it cannot be written, nothing is read."""
    return nullcontext() if file is None else file.open("w", encoding="utf-8")


def show_seconds(
    title: str, files: Sequence[Path], *, quiet: bool
) -> AbstractContextManager[Callable[[float], object]]:
    """Show how many seconds of audio are done; yield a function that adds to them."""
    seconds = None if quiet else sum(map(declared_seconds, files))
    return progress_bar(title, seconds, quiet=quiet)


def write_results(
    options: Namespace,
    files: Sequence[Path],
    results: Iterable[Transcript | Classification | SbkitError],
    errors: TextIO | None,
) -> int:
    """Write the result of each file, or print its error; return the exit code."""
    num_failed = 0
    for file, result in zip(files, results, strict=True):
        if not isinstance(result, SbkitError):
            _write(file, result, options, with_name=len(files) > 1)
            continue
        num_failed += 1
        report_error(file, result, errors)
    if len(files) > 1:
        line = f"{len(files) - num_failed} written, {num_failed} failed"
        if num_failed:
            place = "above" if errors is None else f"in {printable(str(options.errors))}"
            line += f"; the errors are {place}"
        print(line, file=sys.stderr)
    return FILES_FAILED if num_failed else 0


def report_error(file: Path, error: SbkitError, errors: TextIO | None) -> None:
    """Print the error of a file, and write it to the file of ``--errors``."""
    print(error, file=sys.stderr)
    if errors is not None:
        line = json.dumps({"file": str(file), "error": str(error)}, ensure_ascii=False)
        print(printable_json(line), file=errors, flush=True)


def _write(
    file: Path, result: Transcript | Classification, options: Namespace, *, with_name: bool
) -> None:
    """Print a result, after the name of its file if there are several, or write it."""
    text = str(result)
    if options.format == "json":
        text = printable_json(json.dumps(result.plain(), ensure_ascii=False))
    elif isinstance(result, Transcript) and options.format in TIMED_FORMATS:
        text = TIMED_FORMATS[options.format](result.words)
    elif with_name and options.out is None:
        text = f"{printable(str(file))}\t{text}"
    if options.out is None:
        print(text, flush=True)
    else:
        write_text_atomically(options.out / _output_name(file, options), text + "\n")


def _output_name(file: Path, options: Namespace) -> str:
    return f"{file.stem}.{'txt' if options.format in TEXT_FORMATS else options.format}"


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


# ---- the files to read


@contextmanager
def find_audio(arguments: Sequence[str], raw_rate: int | None = None) -> Iterator[list[Path]]:
    """List the files that arguments name, in their order; those of a folder or pattern are sorted.

    Folders are searched to any depth for files with the suffix of an audio format. Standard input
    is first written to a temporary file: readers seek, which a pipe cannot. Missing files are
    listed, too; the error is raised when they are read.

    raw_rate: the sample rate of standard input without a header.

    Raises SbkitError if a folder or a pattern has no audio, or standard input is not audio.
    """
    if raw_rate is not None and STANDARD_INPUT not in arguments:
        raise ConfigError(
            "`--raw-rate` describes standard input, but no FILE is -. Pass -, or leave it out."
        )
    files: list[Path] = []
    with TemporaryDirectory() as folder:
        for argument in arguments:
            path = Path(argument)
            if argument == STANDARD_INPUT:
                path = Path(folder, "stdin")
                _save_standard_input(path, raw_rate)
            matches = [path]
            if path.is_dir():
                matches = find_audio_files(path)
            elif has_magic(argument) and not path.exists():
                matches = sorted(map(Path, glob(argument, recursive=True)))  # noqa: PTH207, that refuses **.wav
            if not matches:
                raise DataError(f"{argument} has no audio files. Correct the folder or pattern.")
            files += matches
        yield files


def _save_standard_input(file: Path, raw_rate: int | None) -> None:
    """Write standard input to a file; raises SbkitError if it is not audio."""
    if raw_rate is None:
        with file.open("wb") as content:
            shutil.copyfileobj(sys.stdin.buffer, content)
        try:
            next(stream_audio(file, block_seconds=0.1))
        except AudioError as error:
            if error.reason != "not audio":  # other errors are raised when it is read
                return
            raise DataError(
                "Standard input is not recognized as audio. Pipe a file with a header, such as "
                "WAV, or give --raw-rate HZ for samples of 16 bits (little-endian, mono)."
            ) from error
        return
    check_rate("`--raw-rate`", raw_rate)
    # The header of a WAV cannot hold the length of more than 4 GB.
    with soundfile.SoundFile(file, "w", raw_rate, 1, "PCM_16", format="W64") as audio:
        while block := sys.stdin.buffer.read(COPY_BYTES):
            audio.buffer_write(block[: len(block) // 2 * 2], "int16")


# ---- classes


def classify(options: Namespace) -> int:
    """Classify the files, and return the exit code."""
    options.out = None  # classes are only printed
    with (
        find_audio(options.files, options.raw_rate) as files,
        open_errors(options.errors) as errors,
        show_seconds("classifying", files, quiet=options.quiet) as on_seconds,
    ):
        modules = options.user_modules
        results = classify_files(options.bundle, files, user_modules=modules, on_seconds=on_seconds)
        return write_results(options, files, results, errors)


def classify_files(
    folder: Path,
    files: Sequence[Path],
    *,
    user_modules: frozenset[str] = frozenset(),
    on_seconds: Callable[[float], object] = float,
) -> Iterator[Classification | SbkitError]:
    """Classify one file after the other; yield the error of a file that cannot be read.

    on_seconds: called with the seconds of audio that were classified since its last call.
    """
    from sbkit.runtime.torch_model import load_bundle

    bundle = load_bundle(folder, user_modules=user_modules)
    bundle.task.require_prediction("label", command="classify")
    for file in files:
        try:
            yield _classify(bundle, file, on_seconds)
        except SbkitError as error:
            yield error


def _classify(
    bundle: "TorchBundle", file: Path, on_seconds: Callable[[float], object]
) -> Classification:
    """Return the most probable class of the segments of a file, each weighted by its length."""
    labels = bundle.labels.names
    rate = bundle.config.sample_rate
    total, samples, seconds = np.zeros(len(labels)), 0, 0.0  # (V,)
    segmenter = Segmenter(rate, min_seconds=MIN_CLASSIFIED_SECONDS)
    for segment in segmenter.split(stream_audio(file, rate)):
        with model_errors_as_bundle_errors(file):
            (probabilities,) = bundle.classify([segment.samples])  # (V,)
        total += len(segment.samples) * probabilities
        samples += len(segment.samples)
        on_seconds(samples_to_seconds(len(segment.samples), rate))
        seconds = samples_to_seconds(segment.start + len(segment.samples), rate)
    best = int(total.argmax())
    return Classification(file, printable(labels[best]), float(total[best] / samples), seconds)

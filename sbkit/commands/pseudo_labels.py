"""`sbkit transcribe --format manifest`: pseudo-labels, a table that training takes as it is.

files -> utterances with confidences -> a line of progress for each file
-> rows for the utterances that are confident enough, and on request their audio

The progress has every utterance, kept or not. A run that was stopped goes on from it, and the table
is made from it again, so another threshold needs no other transcription.
"""

import csv
import glob
import hashlib
import io
import json
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import soundfile

from sbkit.audio.io import read_audio
from sbkit.base.errors import FILES_FAILED, BundleError, ConfigError, DataError, SbkitError
from sbkit.base.files import (
    parse_errors_as_sbkit_errors,
    require_writable,
    try_lock,
    write_bytes_atomically,
    write_text_atomically,
)
from sbkit.base.messages import plural, printable
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.config import BundleConfig, BundleFiles
from sbkit.commands.parts import WHOLE
from sbkit.commands.transcribe import (
    STANDARD_INPUT,
    find_audio,
    open_errors,
    open_transcriber,
    report_error,
    show_seconds,
)
from sbkit.decoding.decoder import Recognition
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.wer import split_units
from sbkit.tasks.task import load_task

MIN_CONFIDENCE = 0.9
MARGIN_SECONDS = 0.5  # of silence that a row has at most before its first word and after its last
COLUMNS = ("id", "path", "offset", "duration", "text", "confidence", "expected_errors")
SEGMENT_COLUMNS = ("id", "path", "text", "confidence", "expected_errors")  # a row is a whole file
MAX_STEM = 50  # characters of a recording's name in the ids of its utterances

Row = dict[str, Any]  # an utterance: the columns but the path; times are in seconds


def write_pseudo_labels(options: Namespace) -> int:
    """Write the table, print how many rows it has and their estimated WER; return the exit code.

    Under torchrun each process transcribes its share of the files on its own device.

    Raises SbkitError if the model has no confidences of utterances, or the options do not fit.
    """
    _check_options(options)
    part = options.part or WHOLE
    config = BundleFiles(options.bundle).config
    settings = _settings(options, config)
    with _join_ranks() as (rank, num_ranks), find_audio(options.files) as named_files:
        labels = PseudoLabels(options, config, settings)
        files = _recordings(named_files, options.segments)
        own_files = part.of(files)[rank::num_ranks]
        errors_file = options.errors and _of_rank(options.errors, rank)
        with labels.open(rank, num_ranks) as progress, open_errors(errors_file) as errors:
            num_failed = _label(own_files, labels, progress, options, errors)
        if num_ranks == 1:
            labels.finish()
        else:
            from sbkit.distributed.ranks import gather_over_ranks, main_rank_first

            num_failed = sum(gather_over_ranks(num_failed))
            with main_rank_first():
                if rank == 0:
                    labels.finish()
    return FILES_FAILED if num_failed else 0


def _check_options(options: Namespace) -> None:
    """Raise ConfigError for options that do not fit."""
    if options.out is None or options.out.suffix != ".csv":
        raise ConfigError(
            "`--format manifest` writes a table, so --out must name it, such as --out pseudo.csv."
        )
    if STANDARD_INPUT in options.files:
        raise ConfigError(
            "`--format manifest` cannot read standard input, because its rows name files. Write "
            "the audio to a file."
        )
    if options.hotwords is not None:
        raise ConfigError(
            "`--format manifest` does not take --hotwords, because confidences are fitted without "
            "them. Leave --hotwords out."
        )
    if options.min_confidence is None:
        options.min_confidence = MIN_CONFIDENCE
    if not 0 <= options.min_confidence < 1:
        raise ConfigError(
            "`--min-confidence` must be a probability of at least 0 and below 1, but is "
            f"{options.min_confidence:g}."
        )
    require_writable(options.out.parent, option="--out")
    if options.segments is not None:
        require_writable(options.segments, option="--segments")


def _settings(options: Namespace, config: BundleConfig) -> dict[str, Any]:
    """Return what decides about texts and confidences, as plain data.

    Raises SbkitError if the model does not transcribe, or has no confidences of utterances.
    """
    task = load_task(config.task, user_modules=options.user_modules)
    task.require_prediction("text", command="transcribe")
    tuned = (config.decoder or {}).get("decoder_type", GREEDY)
    decoder = options.decoder or tuned
    if decoder in (GREEDY, tuned) and decoder not in config.utterance_confidence:
        raise BundleError(
            f"`--format manifest` needs confidences of utterances, but for {decoder} decoding this "
            "model has none, because its validation set had too few right or too few wrong "
            "utterances. Train longer, or fit them to more data: sbkit tune MODEL --data TABLE "
            "--out NEW"
        )
    settings = dict(config.provenance or {})
    settings["decoder"] = None if decoder == GREEDY else settings.get("decoder")
    settings |= {"runtime": options.runtime, "precision": options.precision}
    settings["vad"] = options.vad and str(options.vad)
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _recordings(files: Iterable[Path], segments: Path | None) -> list[Path]:
    """Return absolute paths in their order, each once, without the segments that a run has written.

    Raises DataError if a path is not UTF-8.
    """
    paths = sorted({file.parent.resolve() / file.name for file in files})
    if segments is not None:
        paths = [path for path in paths if not path.is_relative_to(segments.resolve())]
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"The name of {path} is not UTF-8, so a table cannot hold it. Rename it."
            ) from error
    return paths


@contextmanager
def _join_ranks() -> Iterator[tuple[int, int]]:
    """Join the other processes of torchrun, if any; yield the rank and the number of ranks."""
    if "RANK" not in os.environ:  # torch is not imported: ONNX does not need it
        yield 0, 1
        return
    import torch

    from sbkit.distributed.ranks import process_group, rank, world_size

    with process_group(torch.device("cpu")):
        yield rank(), world_size()


def _of_rank(file: Path, rank: int) -> Path:
    """Return the name of a file that each rank writes for itself."""
    return file if rank == 0 else file.with_stem(f"{file.stem}.{rank}")


def _label(
    files: Sequence[Path],
    labels: "PseudoLabels",
    progress: BinaryIO,
    options: Namespace,
    errors: TextIO | None,
) -> int:
    """Transcribe the files that are not finished; return how many failed."""
    todo = [file for file in files if str(file) not in labels.by_file]
    for file in {*files} - {*todo}:
        labels.write_segments(str(file))  # a lower threshold adds some
    if not todo:
        return 0
    num_failed = 0
    with (
        open_transcriber(options, times=True) as transcriber,
        show_seconds("transcribing", todo, quiet=options.quiet) as on_seconds,
    ):
        results = transcriber.stream(todo, on_seconds=on_seconds)
        for file, result in zip(todo, results, strict=True):
            if isinstance(result, SbkitError):
                num_failed += 1
                report_error(file, result, errors)
            else:
                labels.add(str(file), result.utterances, progress)
    return num_failed


class PseudoLabels:
    """The utterances of finished files, the table of those kept, and their segments.

    Attributes:
        by_file: the utterances of each file.
    """

    def __init__(
        self, options: Namespace, config: BundleConfig, settings: Mapping[str, Any]
    ) -> None:
        """Read the progress of earlier runs.

        Raises ConfigError if the table was not written by such a run with the same settings.
        """
        self._table: Path = options.out
        self._segments: Path | None = options.segments
        self._columns = COLUMNS if options.segments is None else SEGMENT_COLUMNS
        self._min_confidence: float = options.min_confidence
        self._config = config
        self._settings = settings
        self._file = self._table.with_suffix(".progress.jsonl")
        self._appends_rows = False
        self.by_file = self._read()
        if self._table.exists() and not self._file.exists():
            raise ConfigError(
                f"{self._table} exists, but was not written by `sbkit transcribe`. Choose another "
                "--out."
            )

    @contextmanager
    def open(self, rank: int, num_ranks: int) -> Iterator[BinaryIO]:
        """Open the progress file of a rank. A single one also makes the table, and appends to it.

        Raises ConfigError if another command is writing the table.
        """
        file = _of_rank(self._file, rank)
        with file.open("ab") as progress:
            if not try_lock(progress.fileno()):
                raise ConfigError(
                    f"Another command is writing {self._table}. Wait for it, or give each --part "
                    "an --out of its own."
                )
            whole_bytes = file.read_bytes().rfind(b"\n") + 1
            progress.truncate(whole_bytes)  # without a line that was cut off
            if not whole_bytes:
                _write_line(progress, self._settings)
            if num_ranks == 1:
                self._write_table()
                self._appends_rows = True
            yield progress

    def add(self, file: str, recognized: Iterable[Recognition], progress: BinaryIO) -> None:
        """Add a file: first to the progress, so that it is not transcribed again."""
        self.by_file[file] = [_to_row(file, utterance) for utterance in recognized]
        _write_line(progress, {"file": file, "utterances": self.by_file[file]})
        self.write_segments(file)
        if self._appends_rows:
            with self._table.open("a", encoding="utf-8") as table:
                table.write(self._lines(file))

    def write_segments(self, file: str) -> None:
        """Write the audio of a file's kept utterances that is not there yet."""
        rate = self._config.sample_rate
        rows = [row for row in self._kept(file) if self._segments and not self._flac(row).exists()]
        audio = read_audio(file, rate) if rows else None
        for row in rows:
            assert audio is not None
            start = seconds_to_samples(row["offset"], rate)
            samples = audio[start : start + seconds_to_samples(row["duration"], rate)]
            content = io.BytesIO()
            soundfile.write(content, samples, rate, format="FLAC")
            write_bytes_atomically(self._flac(row), content.getvalue())

    def finish(self) -> None:
        """Write the table with the files of all ranks, and print what it has."""
        self.by_file = self._read()
        self._write_table()
        spoken = [row for rows in self.by_file.values() for row in rows if row["text"]]
        kept = [row for file in self.by_file for row in self._kept(file)]
        minutes, kept_minutes = (sum(row["duration"] for row in r) / 60 for r in (spoken, kept))
        text = (
            f"{self._table}: {len(kept)} of {plural(len(spoken), 'utterance')} "
            f"({kept_minutes:.1f} of {minutes:.1f} min) with a confidence of at least "
            f"{self._min_confidence:g}"
        )
        by_words = self._config.has_words
        if num_units := sum(len(split_units(row["text"], by_words=by_words)) for row in kept):
            rate, unit = ("WER", "words") if by_words else ("CER", "characters")
            share = sum(row["expected_errors"] for row in kept) / num_units
            text += (
                f"; their estimated {rate} is {100 * share:.1f} % (expected errors, calibrated on "
                f"the validation set, in {num_units} {unit})"
            )
        print(printable(text), flush=True)

    def _read(self) -> dict[str, list[Row]]:
        """Read the progress of all ranks."""
        by_file: dict[str, list[Row]] = {}
        stem = glob.escape(self._file.stem)
        for file in sorted(self._file.parent.glob(f"{stem}*.jsonl")):
            lines = file.read_bytes().split(b"\n")[:-1]  # the last one is empty, or was cut off
            with parse_errors_as_sbkit_errors(
                file, "hold the progress of a run", fix="Choose another --out."
            ):
                plain = [json.loads(line) for line in lines]
                settings = plain[0] if plain else self._settings
                names = [name for name in self._settings if settings[name] != self._settings[name]]
                by_file |= {entry["file"]: entry["utterances"] for entry in plain[1:]}
            if names:
                raise ConfigError(
                    f"{self._table} was begun with another model or other options (different: "
                    f"{', '.join(names).replace('_', ' ')}). Choose another --out."
                )
        return by_file

    def _kept(self, file: str) -> list[Row]:
        """Return the utterances that are confident enough; those without words are not."""
        return [
            row
            for row in self.by_file[file]
            if row["confidence"] is not None and row["confidence"] >= self._min_confidence
        ]

    def _write_table(self) -> None:
        lines = [f"{','.join(self._columns)}\n", *map(self._lines, sorted(self.by_file))]
        write_text_atomically(self._table, "".join(lines))

    def _lines(self, file: str) -> str:
        """Return the lines of the table for a file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="\n")
        for row in self._kept(file):
            path = file
            if self._segments is not None:
                path = os.path.relpath(self._flac(row), self._table.parent)
            writer.writerow({**row, "path": path})
        return text.getvalue()

    def _flac(self, row: Row) -> Path:
        assert self._segments is not None
        return self._segments / f"{row['id']}.flac"


def _write_line(progress: BinaryIO, plain: Mapping[str, Any]) -> None:
    progress.write(f"{json.dumps(plain)}\n".encode())
    progress.flush()


def _to_row(file: str, recognized: Recognition) -> Row:
    """Return an utterance without long silence at its ends; no other one has its id."""
    start = recognized.start
    end = start + recognized.seconds
    if recognized.words:
        start = max(start, recognized.words[0].start - MARGIN_SECONDS)
        end = min(end, recognized.words[-1].end + MARGIN_SECONDS)
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:8]
    errors = recognized.expected_errors
    return {
        "id": f"{Path(file).stem[:MAX_STEM]}-{digest}-{round(1000 * start):09d}",
        "offset": round(start, 3),
        "duration": round(end - start, 3),
        "text": recognized.text,
        "confidence": recognized.confidence,
        "expected_errors": None if errors is None else round(errors, 4),
    }

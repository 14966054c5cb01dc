"""`sbkit transcribe --format manifest`: pseudo-labels, a table that training takes as it is.

files -> utterances with confidences -> progress -> a row for each utterance that is confident
enough, and on request its audio

The progress has every utterance, so another threshold needs no other transcription.
"""

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioPart, read_parts, write_flac
from sbkit.base.errors import FILES_FAILED, BundleError, ConfigError, DataError, SbkitError
from sbkit.base.files import require_writable
from sbkit.base.messages import plural
from sbkit.base.units import MICROSECONDS
from sbkit.bundle.config import BundleConfig, BundleFiles
from sbkit.commands.clip_table import ClipTable, Part, Row, file_of_rank, open_clip_table
from sbkit.commands.transcribe import (
    STANDARD_INPUT,
    find_audio,
    open_errors,
    open_transcriber,
    report_error,
    show_seconds,
)
from sbkit.decoding.clips import Recognition
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.wer import split_units
from sbkit.tasks.task import load_task

MIN_CONFIDENCE = 0.9
MARGIN_SECONDS = 0.5  # of silence that a row has at most before its first word and after its last
COLUMNS = ("id", "path", "offset", "duration", "text", "confidence", "expected_errors")
SEGMENT_COLUMNS = ("id", "path", "text", "confidence", "expected_errors")  # a row is a whole file
MAX_STEM = 50  # characters of a recording's name in the ids of its utterances


def write_pseudo_labels(options: Namespace) -> int:
    """Write the table, print how many rows it has and their estimated WER; return the exit code.

    Under torchrun each process transcribes its share of the files on its own device.

    With a `--min-confidence` of 0, the model need not have confidences of utterances.

    Raises SbkitError if the model lacks them otherwise, or the options do not fit.
    """
    _check_options(options)
    config = BundleFiles(options.bundle).config
    settings = _settings(options, config)
    part = options.part or Part()
    with (
        find_audio(options.files, options.raw_rate) as named_files,
        open_clip_table(options.out, settings) as table,
    ):
        recordings = part.of(_recordings(named_files, options.segments))
        table.require_unchanged(recordings)
        files = table.unfinished(recordings)
        num_failed = table.gather(_transcribe(files, table, options) if files else 0)
        utterances = table.sorted_rows()
        confident = [
            row for row in utterances if (row["confidence"] or 0.0) >= options.min_confidence
        ]
        summary = _describe(
            utterances, confident, options.min_confidence, by_words=config.has_words
        )
        if options.segments is None:
            table.write(COLUMNS, confident, summary)
        else:
            clips = _write_segments(confident, table, options.segments, config.sample_rate)
            table.write(SEGMENT_COLUMNS, clips, summary)
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
    """Return what texts and confidences depend on, as plain data.

    Raises SbkitError if the model does not transcribe, or lacks the confidences that are needed.
    """
    task = load_task(config.task, user_modules=options.user_modules)
    task.require_prediction("text", command="transcribe")
    decoder = options.decoder or (config.decoder or {}).get("decoder_type", GREEDY)
    if options.min_confidence > 0 and decoder not in config.utterance_confidence:
        raise BundleError(
            "`--format manifest` needs confidences of utterances, and this model has none for "
            f"{decoder} decoding. They are fitted to at least ten right and ten wrong utterances "
            "of validation data. Train longer, or fit them to more data: sbkit tune MODEL --data "
            "TABLE --out NEW. Or keep all utterances: --min-confidence 0"
        )
    return {
        **(config.provenance or {}),
        "decoder_type": decoder,
        "runtime": options.runtime,
        "precision": options.precision,
        "vad": options.vad,
    }


def _recordings(files: Iterable[Path], segments: Path | None) -> list[str]:
    """Return absolute paths, sorted, each once, without the segments that a run has written.

    Raises DataError if a path is not UTF-8.
    """
    paths = {file.parent.resolve() / file.name for file in files}
    if segments is not None:
        paths = {path for path in paths if not path.is_relative_to(segments.resolve())}
    names = sorted(map(str, paths))
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise DataError(f"The name of {name} is not UTF-8, so no table can hold it. Rename it.")
    return names


def _transcribe(files: Sequence[str], table: ClipTable, options: Namespace) -> int:
    """Add the utterances of files; return how many files failed."""
    paths = [Path(file) for file in files]
    num_failed = 0
    with (
        open_errors(options.errors and file_of_rank(options.errors, table.rank)) as errors,
        open_transcriber(options, times=True) as transcriber,
        show_seconds("transcribing", paths, quiet=options.quiet) as on_seconds,
    ):
        results = transcriber.stream(paths, on_seconds=on_seconds)
        for file, result in zip(files, results, strict=True):
            if isinstance(result, SbkitError):
                num_failed += 1
                report_error(Path(file), result, errors)
            else:
                spoken = [utterance for utterance in result.utterances if utterance.words]
                table.add_file(file, [_to_row(file, utterance) for utterance in spoken])
    return num_failed


def _to_row(file: str, utterance: Recognition) -> Row:
    """Return an utterance without long silence at its ends; no other one has its id."""
    start = max(utterance.start, utterance.words[0].start - MARGIN_SECONDS)
    end = min(utterance.start + utterance.seconds, utterance.words[-1].end + MARGIN_SECONDS)
    return {
        "id": utterance_id(file, start),
        "path": file,
        "offset": round(start, 3),
        "duration": round(end - start, 3),
        "text": utterance.text,
        "confidence": utterance.confidence,
        "expected_errors": utterance.expected_errors,
    }


def utterance_id(file: str, start: float) -> str:
    """Return the id of the utterance that starts at a time in seconds of a recording."""
    digest = hashlib.sha256(file.encode()).hexdigest()[:8]
    return f"{Path(file).stem[:MAX_STEM]}-{digest}-{round(1000 * start):09d}"


def _write_segments(
    rows: Sequence[Row], table: ClipTable, folder: Path, sample_rate: int
) -> list[Row]:
    """Write the audio of this rank's share of rows, unless it is there; return rows that name it.

    Raises AudioError if a recording cannot be read anymore.
    """
    by_recording = [[*group] for _, group in groupby(rows, key=itemgetter("path"))]
    for recording_rows in table.share(by_recording):
        parts: dict[Path, AudioPart] = {}
        for row in recording_rows:
            start = round(row["offset"] * MICROSECONDS)
            end = start + round(row["duration"] * MICROSECONDS)
            parts[folder / f"{row['id']}.flac"] = AudioPart(row["path"], start, end)
        missing = {clip: part for clip, part in parts.items() if not clip.exists()}
        if missing:
            signals = read_parts([*missing.values()], sample_rate)
            for clip, samples in zip(missing, signals, strict=True):
                if isinstance(samples, AudioError):
                    raise samples
                write_flac(clip, samples, sample_rate)
    relative = os.path.relpath(folder, table.file.parent)
    return [{**row, "path": f"{relative}/{row['id']}.flac"} for row in rows]


def _describe(
    utterances: Sequence[Row], confident: Sequence[Row], min_confidence: float, *, by_words: bool
) -> str:
    """Return how many utterances are confident, and their estimated WER or CER."""
    minutes = sum(row["duration"] for row in utterances) / 60
    kept_minutes = sum(row["duration"] for row in confident) / 60
    counts = (
        f"{len(confident)} of {plural(len(utterances), 'utterance')} ({kept_minutes:.1f} of "
        f"{minutes:.1f} min) with a confidence of at least {min_confidence:g}"
    )
    if not confident or any(row["confidence"] is None for row in confident):
        return counts
    num_units = sum(len(split_units(row["text"], by_words=by_words)) for row in confident)
    rate = sum(row["expected_errors"] for row in confident) / num_units
    name, units = ("WER", "words") if by_words else ("CER", "characters")
    return (
        f"{counts}; their estimated {name} is {100 * rate:.1f} % (expected errors, calibrated on "
        f"the validation set, in {num_units} {units})"
    )

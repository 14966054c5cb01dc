"""`sbkit transcribe --format manifest`: pseudo-labels, a table that training takes as it is.

files -> utterances with confidences -> progress -> a row for each that is confident enough

The progress has every utterance, so another threshold needs no other transcription.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbkit.audio.segments import MARGIN_SECONDS
from sbkit.base.errors import FILES_FAILED, BundleError, ConfigError, SbkitError
from sbkit.base.files import require_writable
from sbkit.base.messages import plural
from sbkit.bundle.config import BundleConfig, BundleFiles
from sbkit.commands.clip_table import ClipTable, Row, Share, open_clip_table, utterance_id
from sbkit.commands.recordings import (
    find_audio,
    open_errors,
    open_transcriber,
    report_error,
    show_seconds,
)
from sbkit.decoding.clips import Recognition
from sbkit.decoding.words import BEAM, GREEDY
from sbkit.evaluate.wer import split_units
from sbkit.runtime.sources import STANDARD_INPUT
from sbkit.tasks.task import load_task

MIN_CONFIDENCE = 0.9
COLUMNS = ("id", "path", "offset", "duration", "text", "confidence", "expected_errors")


def write_pseudo_labels(options: Namespace) -> int:
    """Write the table, print how many rows it has and their estimated WER; return the exit code.

    With a `--min-confidence` of 0, the model need not have confidences of utterances.

    Raises SbkitError if the model lacks them otherwise, or the options do not fit.
    """
    _check_options(options)
    config = BundleFiles(options.bundle).config
    settings = _settings(options, config)
    share = options.part or Share()
    with (
        find_audio(options.files, options.raw_rate) as named_files,
        open_clip_table(options.out, settings) as table,
    ):
        names = sorted({str(file.parent.resolve() / file.name) for file in named_files})
        recordings = share.of(names)
        table.require_unchanged(recordings)
        files = table.unfinished(recordings)
        num_failed = _transcribe(files, table, options) if files else 0
        utterances = table.sorted_rows()
        confident = [
            row for row in utterances if (row["confidence"] or 0.0) >= options.min_confidence
        ]
        summary = _describe(
            utterances, confident, options.min_confidence, by_words=config.has_words
        )
        table.write(COLUMNS, confident, summary)
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


def _settings(options: Namespace, config: BundleConfig) -> dict[str, Any]:
    """Return what texts and confidences depend on, as plain data.

    Raises SbkitError if the model does not transcribe, or lacks the confidences that are needed.
    """
    task = load_task(config.task, user_modules=options.user_modules)
    task.require_prediction("text", command="transcribe")
    decoder = options.decoder or (GREEDY if config.decoder is None else BEAM)
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


def _transcribe(files: Sequence[str], table: ClipTable, options: Namespace) -> int:
    """Add the utterances of files; return how many files failed."""
    paths = [Path(file) for file in files]
    num_failed = 0
    with (
        open_errors(options.errors) as errors,
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

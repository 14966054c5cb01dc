"""The score of a trained model on any data. Nothing is trained, and no run is written to.

model: a bundle, or a run, of which a bundle is made first -> data: tables, folders of Kaldi, saved
datasets -> prepared as for training -> whole clips transcribed or classified -> scored
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable, scratch_folder, to_json, write_text_atomically
from sbkit.base.units import samples_to_seconds
from sbkit.base.version import __version__
from sbkit.base.words import plural
from sbkit.data.batches.batch import OWN
from sbkit.data.corpora.columns import filled_rows
from sbkit.data.corpora.kaldi import is_kaldi
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.corpora.own_manifest import read_manifests
from sbkit.data.corpora.release import read_release
from sbkit.data.corpora.splits import Splits
from sbkit.data.corpora.tables import TEXT_COLUMNS, read_table, refuse_columns
from sbkit.data.storage.audio_cache import default_cache
from sbkit.data.storage.audio_store import read_clips
from sbkit.data.storage.prepare import prepare_split
from sbkit.decoding.confidence import GREEDY
from sbkit.evaluate.accuracy_report import (
    ACCURACY,
    Answer,
    accuracy_figures,
    describe_accuracy,
)
from sbkit.evaluate.report import ERROR_RATES, REPORT, Known, write_report
from sbkit.evaluate.run_results import read_results
from sbkit.evaluate.wer import Scored, score
from sbkit.evaluate.wer_report import describe_results, report_errors, slice_error_rates
from sbkit.inference.bundle.bundle import CONFIG, Bundle, load_bundle
from sbkit.inference.bundle.export import export_run
from sbkit.inference.formats.held_out import find_held_out
from sbkit.inference.runtime.model import fitting
from sbkit.inference.transcribe.whole_clips import read_whole_clips
from sbkit.train.evaluation import clips_of
from sbkit.train.slices import measure_slices, require_columns, slice_columns, write_slices

SCORES = "scores.json"
ScoreBatch = Callable[[Sequence[Mapping[str, Any]], list[Samples]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How the data is to be read, and what is to be reported of it.

    Attributes:
        out: a folder for the reports, or None for none.
        label: of a classifier, the column of the right answer.
        report_by: columns; the metrics of each of their values are reported.
        path_column, text_column: of the tables; None for the usual names.
        decoder: greedy, beam or graph; None for the model's own.
        hotwords: phrases to expect, or a file of them.
    """

    out: Path | None = None
    label: str | None = None
    report_by: Sequence[str] = ()
    path_column: str | None = None
    text_column: str | None = None
    decoder: str | None = None
    hotwords: str | None = None


@dataclass(frozen=True)
class Task:
    """What is done with a batch of rows and their clips, and with the results of all.

    measure: the figures of each value of a column; report: writes files, returns all figures;
    sample_rate: of the model.
    """

    sample_rate: int
    score: ScoreBatch
    measure: Callable[[Sequence[Any]], Mapping[str, Any]]
    describe: Callable[[Sequence[Any]], str]
    report: Callable[[Path, str, Sequence[Any]], Mapping[str, Any]]


def score_model(
    model: Path, sources: Sequence[Path], wanted: Wanted, *, own: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield a line for every source once it is scored; without any, for the test sets of a run.

    Raises:
        SbkitError: the model or a source cannot be read, ``out`` holds scores already, or nothing
            can be written there; or a column is named, which no source has.
    """
    if all(map(is_kaldi, sources)):
        refuse_columns(vars(wanted), "data in Kaldi's form" if sources else "a run's own test sets")
    if wanted.out is not None:
        if (wanted.out / SCORES).exists():
            raise SbkitError(
                f"`--out` must be a folder without scores, but {wanted.out} has some, which are "
                "not overwritten. Choose another folder."
            )
        require_writable(wanted.out, option="--out")
    elif wanted.report_by:
        raise SbkitError(
            "`--report-by` must come with --out DIR, for its tables, but there is none. Add it."
        )
    entries: dict[str, Any] = {}
    scored: dict[str, datasets.Dataset] = {}
    with open_model(model, own) as opened:
        bundle = opened.with_decoder(wanted.decoder).with_hotwords(wanted.hotwords)
        task = _task_of(bundle, wanted)
        for name, prepared in _prepare(bundle, model, sources, wanted):
            rows = scored[name] = _labelled(prepared, bundle, wanted)
            results = score_rows(bundle, rows, task.score)
            entries[name] = _report(name, rows, results, task, wanted)
            left = len(prepared) - len(rows)
            without = f", without {left} whose {wanted.label} is empty" if left else ""
            yield f"{name}: {task.describe(results)}, {plural(len(rows), 'utterance')}{without}"
    if wanted.out is not None:
        _write_page(wanted.out, entries, scored, bundle, model)
        text = to_json(
            {"model": str(model), **describe_decoding(bundle), "test": entries}, indent=2
        )
        write_text_atomically(wanted.out / SCORES, text + "\n")


def _report(
    name: str, rows: datasets.Dataset, results: Sequence[Any], task: Task, wanted: Wanted
) -> dict[str, Any]:
    """Write the reports of a source where a folder is named for them, and return its figures."""
    if wanted.out is None:
        return {}
    entry: dict[str, Any] = {"utterances": len(rows), **task.report(wanted.out, name, results)}
    if wanted.report_by:
        known = {each: rows[each][:] for each in wanted.report_by if each in rows.column_names}
        clips = read_clips(rows, range(len(rows)))
        columns = slice_columns(
            wanted.report_by, known, rows["samples"][:], task.sample_rate, clips
        )
        slices = measure_slices(wanted.report_by, columns, results, task.measure)
        write_slices(wanted.out / f"report_by_{name}.tsv", slices)
        entry["report_by"] = slices
    return entry


def describe_decoding(bundle: Bundle) -> dict[str, Any]:
    """Say how a recognizer's text was decoded, and with which hotwords."""
    if not bundle.config.is_asr:
        return {}
    if bundle.decoder is None:
        return {"decoder": GREEDY}
    said: dict[str, Any] = {"decoder": bundle.decoder.kind}
    if bundle.decoder.phrases:
        said |= {"hotwords": bundle.decoder.phrases, "refused_hotwords": bundle.refused_hotwords}
    return said


def _write_page(
    out: Path,
    entries: Mapping[str, Any],
    scored: Mapping[str, datasets.Dataset],
    bundle: Bundle,
    model: Path,
) -> None:
    """Write ``report.html`` with the audio that was scored."""
    words = None if bundle.decoder is None else bundle.decoder.language_models.words
    write_report(
        out / REPORT,
        [read_results(out, entries)],
        metrics=ERROR_RATES if bundle.config.is_asr else ACCURACY,
        clips=partial(clips_of, scored, bundle.config.sample_rate),
        known=None
        if words is None
        else Known(words=words, source="the words of the language model"),
        notes=[f"{model.name}, sbkit {__version__}"],
    )


@contextmanager
def open_model(model: Path, own: frozenset[str] = frozenset()) -> Iterator[Bundle]:
    """Load a bundle, or make one of a run in a temporary folder."""
    if (model / CONFIG).exists():
        yield load_bundle(model, own=own)
        return
    with scratch_folder("sbkit-score") as folder:
        export_run(model, folder / "bundle", own=own)
        yield load_bundle(folder / "bundle", own=own)


def _prepare(
    bundle: Bundle, model: Path, sources: Sequence[Path], wanted: Wanted
) -> Iterator[tuple[str, datasets.Dataset]]:
    """Yield each source by its name as training prepares it; without any, a run's test sets."""
    if sources:
        for name, source in _named(sources).items():
            yield name, prepare_source(bundle, source, wanted, name)
        return
    if (model / CONFIG).exists():
        raise SbkitError(
            f"A bundle must be given the data to score it on, but {model} stands alone, and it "
            "knows of no test set, as a run does. Name a table: sbkit score BUNDLE test.csv"
        )
    for name, rows in find_held_out(model).sets.items():
        _require_columns(rows, wanted, name)
        yield name, rows


def _named(sources: Sequence[Path]) -> dict[str, Path]:
    """Name each source by its file, so that its reports can be."""
    named = {source.stem or source.resolve().stem: source for source in sources}
    if len(named) < len(sources):
        raise SbkitError(
            "Files to score must have different names, because their reports have them, but two "
            "have the same. Score them one after the other, each with an --out of its own."
        )
    return named


def prepare_source(bundle: Bundle, source: Path, wanted: Wanted, name: str) -> datasets.Dataset:
    """Decode and normalize a source as training does; rows without text stay, as in a test set."""
    language = bundle.config.language or "und"
    prepared = prepare_split(
        _read(source, wanted, language, has_text=bundle.config.is_asr),
        split=name,
        normalize=bundle.normalizer() if bundle.config.is_asr else str,
        sample_rate=bundle.config.sample_rate,
        cache_folder=default_cache(),
        keep_empty=True,
    )
    rows = prepared.dataset
    _require_columns(rows, wanted, name)
    return rows


def _require_columns(rows: datasets.Dataset, wanted: Wanted, name: str) -> None:
    require_columns([*wanted.report_by], Splits(rows, {}, {name: rows}))
    columns = [each for each in rows.column_names if each not in OWN]
    if wanted.label and wanted.label not in columns:
        raise SbkitError(
            f"`--label` must name a column with the right answers, but {name} has no "
            f"`{wanted.label}`. It has {', '.join(columns)}."
        )


def _labelled(rows: datasets.Dataset, bundle: Bundle, wanted: Wanted) -> datasets.Dataset:
    """Return the rows of a classifier's data that have a label; there must be one it knows."""
    label = wanted.label
    if bundle.config.is_asr or label is None:
        return rows
    filled, known = filled_rows(rows, label), bundle.require_labels()
    labelled = rows if len(filled) == len(rows) else rows.select(filled)
    if {*known}.isdisjoint(map(str, labelled[label])):
        raise SbkitError(
            f"`--label` must name a column with the right answers, but `{label}` has none of the "
            f"model's classes ({', '.join(known[:10])}) in {len(rows)} rows. Fill it, or choose "
            "another column."
        )
    return labelled


def _read(source: Path, wanted: Wanted, language: str, *, has_text: bool) -> Manifest:
    is_release = source.suffix == ".tsv" and (source.parent / "clips").is_dir()
    if is_release and not has_text:
        has_text = not {*TEXT_COLUMNS}.isdisjoint(map(str.lower, read_table(source).columns))
    text_column: str | Literal[False] | None = wanted.text_column if has_text else False
    if is_release:
        knobs = {"path_column": wanted.path_column, "text_column": text_column}
        return read_release(source, language, knobs)
    return read_manifests(
        [source], path_column=wanted.path_column, text_column=text_column, language=language
    )


def score_rows(bundle: Bundle, rows: datasets.Dataset, score: ScoreBatch) -> list[Any]:
    """Score every utterance, the shortest first, in the order of the rows."""
    found: dict[int, Any] = {}
    for clips in read_whole_clips(rows, bundle.config.sample_rate):
        with fitting(", ".join(row["id"] for row in clips.rows[:3])):
            found |= zip(clips.places, score(clips.rows, clips.audio), strict=True)
    return [found[row] for row in range(len(rows))]


def _task_of(bundle: Bundle, wanted: Wanted) -> Task:
    if bundle.config.is_asr:
        return Task(
            sample_rate=bundle.config.sample_rate,
            score=partial(_transcribe, bundle, wanted.out is not None),
            measure=slice_error_rates,
            describe=describe_results,
            report=report_errors,
        )
    if wanted.label is None:
        raise SbkitError(
            "A classifier must be told the column of the right answers, but `--label` is missing. "
            "Pass --label=language, or another column of the data."
        )
    return Task(
        sample_rate=bundle.config.sample_rate,
        score=partial(_classify, bundle, wanted.label),
        measure=accuracy_figures,
        describe=describe_accuracy,
        report=_report_answers,
    )


def _transcribe(
    bundle: Bundle, times: bool, rows: Sequence[Mapping[str, Any]], clips: list[Samples]
) -> list[Scored]:
    rate, found = bundle.config.sample_rate, bundle.recognize(clips, times=times)
    return [
        score(
            row["id"],
            row["text"],
            heard.text,
            speaker=str(row.get("speaker", "")),
            seconds=samples_to_seconds(row["samples"], rate),
            words=heard.words,
            by_words=bundle.config.has_words,
        )
        for row, heard in zip(rows, found, strict=True)
    ]


def _classify(
    bundle: Bundle, label: str, rows: Sequence[Mapping[str, Any]], clips: list[Samples]
) -> list[Answer]:
    names = bundle.require_labels()
    best = bundle.classify(clips).argmax(1).tolist()
    return [
        Answer(row["id"], str(row[label]), names[each], row.get("speaker", ""))
        for row, each in zip(rows, best, strict=True)
    ]


def _report_answers(out: Path, name: str, results: Sequence[Answer]) -> Mapping[str, Any]:
    rows = [("id", "right", "found"), *((each.id, each.right, each.found) for each in results)]
    lines = ["\t".join(" ".join(each.split()) for each in row) for row in rows]
    write_text_atomically(out / f"answers_{name}.tsv", "\n".join(lines) + "\n")
    return accuracy_figures(results)

"""The score of a trained model on any data. Nothing is trained, and no run is written to.

model: a bundle, or a run, of which a bundle is made first -> data: tables, folders of Kaldi, saved
datasets -> prepared as for training -> whole clips transcribed or classified -> scored
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable, to_json, write_text_atomically
from sbkit.base.messages import plural
from sbkit.base.versions import __version__
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import Provenance, describe_provenance, settings_of
from sbkit.checkpoint.run_config import RESOLVED
from sbkit.config.document import read_document
from sbkit.data.batch import user_columns
from sbkit.data.cache import default_cache
from sbkit.data.release import read_release
from sbkit.data.shard import read_clips
from sbkit.data.sources import read_manifests
from sbkit.data.splits import filled_rows, prepare_split, sample_counts
from sbkit.data.tables import TableOptions
from sbkit.decoding.confidence import GREEDY
from sbkit.evaluate.report import REPORT, KnownWords, write_report
from sbkit.evaluate.run_results import read_results
from sbkit.evaluate.slices import measure_slices, require_columns, slice_columns, write_slices
from sbkit.evaluate.utterances import PROVENANCE
from sbkit.export.export import as_bundle
from sbkit.export.test_sets import prepare_test_sets, read_whole_clips
from sbkit.logs.progress import shown
from sbkit.runtime.model import naming_audio
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.tasks.task import Scorer, Task
from sbkit.train.evaluation import clips_of

SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How the data is to be read, and what is to be reported of it.

    Attributes:
        out: a folder for the reports, or None for none.
        label: of a classifier, the column of the right answer.
        report_by: columns; the metrics of each of their values are reported.
        path_column, text_column: of the tables; None for those of the run, or the usual names.
        decoder: greedy, beam or graph; None for the model's own.
        hotwords: phrases to expect, or a file of them.
        quiet: show no progress.
    """

    out: Path | None = None
    label: str | None = None
    report_by: Sequence[str] = ()
    path_column: str | None = None
    text_column: str | None = None
    decoder: str | None = None
    hotwords: str | None = None
    quiet: bool = False


def score_model(
    model: Path,
    sources: Sequence[Path],
    options: ScoreOptions,
    *,
    user_modules: frozenset[str] = frozenset(),
) -> Iterator[str]:
    """Yield a line for every source once it is scored; without any, for the test sets of a run.

    Raises:
        SbkitError: the model or a source cannot be read, ``out`` holds scores already, or nothing
            can be written there.
    """
    if options.out is not None:
        if (options.out / SCORES).exists():
            raise SbkitError(
                f"`--out` must be a folder without scores, but {options.out} has some, which are "
                "not overwritten. Choose another folder."
            )
        require_writable(options.out, option="--out")
    elif options.report_by:
        raise SbkitError(
            "`--report-by` must come with --out DIR, for its tables, but there is none. Add it."
        )
    options = _with_columns_of_run(model, options)
    entries: dict[str, Any] = {}
    scored: dict[str, datasets.Dataset] = {}
    with open_model(model, user_modules) as opened:
        bundle = opened.with_decoder(options.decoder).with_hotwords(options.hotwords)
        scorer = _scorer_of(bundle.task, options)
        score = partial(scorer.score, bundle, label=options.label, times=options.out is not None)
        for name, prepared in _prepare(bundle, model, sources, options):
            rows = prepared
            if scorer.target == "label" and options.label is not None:
                rows = _labelled(prepared, bundle, options.label)
            scored[name] = rows
            results = score_rows(bundle, rows, score, title=f"scoring {name}", quiet=options.quiet)
            if options.out is not None:
                entries[name] = _report(options.out, name, rows, results, bundle, options)
            left = len(prepared) - len(rows)
            without = f", without {left} whose {options.label} is empty" if left else ""
            yield f"{name}: {scorer.describe(results)}, {plural(len(rows), 'utterance')}{without}"
    if options.out is not None:
        _write_page(options.out, entries, scored, bundle, model)
        record = {PROVENANCE: provenance_of_bundle(bundle), "test": entries}
        text = to_json({"model": str(model), **describe_decoding(bundle), **record}, indent=2)
        write_text_atomically(options.out / SCORES, text + "\n")


def _with_columns_of_run(model: Path, options: ScoreOptions) -> ScoreOptions:
    """Read the tables by the columns that a run was trained on, but for those that are given."""
    if (model / CONFIG_FILE).exists() or not (model / RESOLVED).is_file():
        return options
    knobs, names = read_document(model / RESOLVED).root, ("path_column", "text_column")
    own = {name: knobs.get(name) for name in names if getattr(options, name) is None}
    return replace(options, **own)


def _report(
    folder: Path,
    name: str,
    rows: datasets.Dataset,
    results: Sequence[Any],
    bundle: TorchBundle,
    options: ScoreOptions,
) -> dict[str, Any]:
    """Write the reports of a source, and return its figures."""
    scorer, report_by = _scorer_of(bundle.task, options), options.report_by
    entry: dict[str, Any] = {"utterances": len(rows), **scorer.report(folder, name, results)}
    if report_by:
        known = {each: rows[each][:] for each in report_by if each in rows.column_names}
        rate, clips = bundle.config.sample_rate, read_clips(rows, range(len(rows)))
        columns = slice_columns(report_by, known, rows["samples"][:], rate, clips)
        entry["report_by"] = measure_slices(report_by, columns, results, scorer.measure)
        write_slices(folder / f"report_by_{name}.tsv", entry["report_by"])
    return entry


def describe_decoding(bundle: TorchBundle) -> dict[str, Any]:
    """Return the decoder of a recognizer and its hotwords, as plain data."""
    if bundle.task.predicts != "text":
        return {}
    if bundle.decoder is None:
        return {"decoder": GREEDY}
    described: dict[str, Any] = {"decoder": bundle.decoder.decoder_type}
    if bundle.decoder.phrases:
        described |= {
            "hotwords": bundle.decoder.phrases,
            "refused_hotwords": bundle.refused_hotwords,
        }
    return described


def provenance_of_bundle(bundle: TorchBundle) -> Provenance:
    """Return the record of a bundle with the decoder that was asked for."""
    found = bundle.decoder
    settings = None if found is None else {**vars(found), "weights": found.weights.plain()}
    return {**(bundle.config.provenance or {}), "decoder": settings_of(settings)}


def _write_page(
    out: Path,
    entries: Mapping[str, Any],
    scored: Mapping[str, datasets.Dataset],
    bundle: TorchBundle,
    model: Path,
) -> None:
    """Write ``report.html`` with the audio that was scored."""
    words = None if bundle.decoder is None else bundle.decoder.language_models.words
    write_report(
        out / REPORT,
        [read_results(out, entries)],
        metrics=bundle.task.metrics,
        clips=partial(clips_of, scored, bundle.config.sample_rate),
        known=None
        if words is None
        else KnownWords(words=words, source="the words of the language model"),
        notes=[
            f"{model.name}, sbkit {__version__}",
            describe_provenance(provenance_of_bundle(bundle)),
        ],
    )


@contextmanager
def open_model(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[TorchBundle]:
    """Load a bundle, or make one of a run in a temporary folder."""
    with as_bundle(model, user_modules) as folder:
        yield load_bundle(folder, user_modules=user_modules)


def _prepare(
    bundle: TorchBundle, model: Path, sources: Sequence[Path], options: ScoreOptions
) -> Iterator[tuple[str, datasets.Dataset]]:
    """Yield each source by its name as training prepares it; without any, a run's test sets."""
    names = [source.stem or source.resolve().stem for source in sources]
    if len({*names}) < len(names):
        raise SbkitError(
            "Files to score must have different names, because their reports have them, but two "
            "have the same. Score them one after the other, each with an --out of its own."
        )
    if sources:
        for name, source in zip(names, sources, strict=True):
            yield name, prepare_source(bundle, source, options, name)
        return
    if (model / CONFIG_FILE).exists():
        raise SbkitError(
            f"A bundle must be given the data to score it on, but {model} stands alone, and it "
            "knows of no test set, as a run does. Name a table: sbkit score BUNDLE test.csv"
        )
    for name, rows in prepare_test_sets(model).items():
        _require_columns(rows, options, name)
        yield name, rows


def prepare_source(
    bundle: TorchBundle, source: Path, options: ScoreOptions, name: str
) -> datasets.Dataset:
    """Decode and normalize a source as training does; rows without text stay, as in a test set."""
    language, scorer = bundle.config.language or "und", bundle.task.scorer
    has_text = scorer is not None and scorer.target == "text"
    columns = TableOptions(
        path_column=options.path_column,
        text_column=options.text_column if has_text else False,
        language=language,
    )
    if source.suffix == ".tsv" and (source.parent / "clips").is_dir():
        manifest = read_release(source, columns)
    else:
        manifest = read_manifests([source], columns)
    prepared = prepare_split(
        manifest,
        split=name,
        normalize=bundle.normalizer() if has_text else str,
        sample_rate=bundle.config.sample_rate,
        cache_folder=default_cache(),
        keep_empty=True,
    )
    _require_columns(prepared.dataset, options, name)
    return prepared.dataset


def _require_columns(rows: datasets.Dataset, options: ScoreOptions, name: str) -> None:
    columns = user_columns(rows.column_names)
    require_columns([*options.report_by], {name: columns})
    if options.label and options.label not in columns:
        raise SbkitError(
            f"`--label` must name a column with the right answers, but {name} has no "
            f"`{options.label}`. It has {', '.join(columns)}."
        )


def _labelled(rows: datasets.Dataset, bundle: TorchBundle, label: str) -> datasets.Dataset:
    """Return the rows of a classifier's data that have a label; there must be one it knows."""
    filled, labels = filled_rows(rows, label), bundle.task.labels
    known = () if labels is None else labels.names(bundle.labels)
    labelled = rows if len(filled) == len(rows) else rows.select(filled)
    if {*known}.isdisjoint(map(str, labelled[label])):
        raise SbkitError(
            f"`--label` must name a column with the right answers, but `{label}` has none of the "
            f"model's classes ({', '.join(known[:10])}) in {len(rows)} rows. Fill it, or choose "
            "another column."
        )
    return labelled


def score_rows(
    bundle: TorchBundle,
    rows: datasets.Dataset,
    score: Callable[..., list[Any]],
    *,
    title: str = "scoring",
    quiet: bool = False,
) -> list[Any]:
    """Score every utterance, the shortest first, in the order of the rows."""
    found: dict[int, Any] = {}
    with shown(title, float(sample_counts(rows).sum()), quiet=quiet) as advance:
        for batch in read_whole_clips(rows, bundle.config.sample_rate):
            few = [*batch.values()]
            clips = [row["audio"] for row in few]
            with naming_audio(", ".join(row["id"] for row in few[:3])):
                found |= zip(batch, score(few, clips), strict=True)
            advance(sum(map(len, clips)))
    return [found[row] for row in range(len(rows))]


def _scorer_of(task: Task, options: ScoreOptions) -> Scorer:
    """Return how a task is scored; raises SbkitError where a label is missing."""
    if task.scorer is None:
        raise SbkitError(
            f"A model must be of a task with a `scorer` to be scored, but {task.name} has none. "
            "Add one to the task."
        )
    if task.scorer.target == "label" and options.label is None:
        raise SbkitError(
            "`--label` must name the column of a classifier's right answers, but is missing. "
            "Pass --label=language, or another column of the data."
        )
    return task.scorer

"""`sbkit score`: score a trained model on any data, without training or writing into a run.

model: a bundle, or a run, which is exported first -> data: tables, folders of Kaldi, saved datasets
-> prepared as for training -> whole clips transcribed or classified -> scored
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import require_writable, to_json, write_text_atomically
from sbkit.base.messages import plural
from sbkit.base.versions import __version__
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import Provenance, describe_provenance, settings_of
from sbkit.checkpoint.run_config import RESOLVED
from sbkit.config.document import read_document
from sbkit.data.batch import user_columns
from sbkit.data.cache import default_cache
from sbkit.data.shard import read_clips
from sbkit.data.sources import read_manifests
from sbkit.data.splits import filled_rows, prepare_split, sample_counts
from sbkit.data.tables import TableOptions, read_release
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.report import REPORT, KnownWords, write_report
from sbkit.evaluate.run_results import read_results
from sbkit.evaluate.slices import measure_slices, require_columns, slice_columns, write_slices
from sbkit.evaluate.wer import Figures
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.export import as_bundle
from sbkit.export.test_sets import prepare_test_sets, read_whole_clips
from sbkit.logs.progress import progress_bar
from sbkit.runtime.model import naming_audio
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.tasks.task import Scorer, Task
from sbkit.train.evaluation import clips_of

SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How the data is read, and what is reported.

    Attributes:
        out: a folder for the reports, or None.
        label: for a classifier, the column of the right answers.
        report_by: columns whose values are reported separately.
        path_column, text_column: of the tables; None for those of the run, or the usual names.
        decoder: greedy, beam or graph; None for the model's own.
        hotwords: phrases to expect, or a file of phrases.
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
    """Yield a line for each source once it is scored; without sources, for a run's test sets.

    Raises SbkitError if the model or a source cannot be read, or ``options.out`` has scores already
    or cannot be written.
    """
    if options.out is not None:
        if (options.out / SCORES).exists():
            raise ConfigError(
                f"{options.out} already has scores, which are not overwritten. Choose another "
                "folder for --out."
            )
        require_writable(options.out, option="--out")
    elif options.report_by:
        raise ConfigError("`--report-by` writes tables, so it needs --out DIR. Add it.")
    options = _with_columns_of_run(model, options)
    entries: dict[str, Figures] = {}
    scored: dict[str, datasets.Dataset] = {}
    with open_model(model, user_modules) as opened:
        bundle = opened.with_decoder(options.decoder).with_hotwords(options.hotwords)
        scorer = _scorer_of(bundle.task, options)
        score = partial(scorer.score, bundle, label=options.label, times=options.out is not None)
        for name, prepared in _prepare(bundle, model, sources, options):
            rows = prepared
            if scorer.target == "label" and options.label is not None:
                rows = _labeled(prepared, bundle, options.label)
            scored[name] = rows
            results = score_rows(bundle, rows, score, title=f"scoring {name}", quiet=options.quiet)
            if options.out is not None:
                entries[name] = _report(options.out, name, rows, results, bundle, options)
            num_empty = len(prepared) - len(rows)
            note = f", without {num_empty} whose {options.label} is empty" if num_empty else ""
            yield f"{name}: {scorer.describe(results)}, {plural(len(rows), 'utterance')}{note}"
    if options.out is not None:
        _write_page(options.out, entries, scored, bundle, model)
        record = {PROVENANCE: provenance_of_bundle(bundle), "test": entries}
        text = to_json({"model": str(model), **describe_decoding(bundle), **record}, indent=2)
        write_text_atomically(options.out / SCORES, text + "\n")


def _with_columns_of_run(model: Path, options: ScoreOptions) -> ScoreOptions:
    """Use the columns that a run was trained on, unless the options name others."""
    if (model / CONFIG_FILE).exists() or not (model / RESOLVED).is_file():
        return options
    knobs, names = read_document(model / RESOLVED).root, ("path_column", "text_column")
    return replace(
        options, **{name: knobs.get(name) for name in names if getattr(options, name) is None}
    )


def _report(
    folder: Path,
    name: str,
    rows: datasets.Dataset,
    results: Sequence[Any],
    bundle: TorchBundle,
    options: ScoreOptions,
) -> Figures:
    """Write the reports of a source, and return its figures."""
    scorer, report_by = _scorer_of(bundle.task, options), options.report_by
    entry: Figures = {"utterances": len(rows), **scorer.report(folder, name, results)}
    if report_by:
        present = {name: rows[name][:] for name in report_by if name in rows.column_names}
        rate, clips = bundle.config.sample_rate, read_clips(rows, range(len(rows)))
        columns = slice_columns(report_by, present, rows["samples"][:], rate, clips)
        entry["report_by"] = measure_slices(report_by, columns, results, scorer.measure)
        write_slices(folder / f"report_by_{name}.tsv", entry["report_by"])
    return entry


def describe_decoding(bundle: TorchBundle) -> Figures:
    """Return the decoder of a recognizer and its hotwords, as plain data."""
    if bundle.task.predicts != "text":
        return {}
    if bundle.decoder is None:
        return {"decoder": GREEDY}
    description: Figures = {"decoder": bundle.decoder.decoder_type}
    if bundle.decoder.phrases:
        description["hotwords"] = bundle.decoder.phrases
        description["refused_hotwords"] = bundle.refused_hotwords
    return description


def provenance_of_bundle(bundle: TorchBundle) -> Provenance:
    """Return the provenance of a bundle with the chosen decoder."""
    settings = None if bundle.decoder is None else bundle.decoder.plain()
    return {**(bundle.config.provenance or {}), "decoder": settings_of(settings)}


def _write_page(
    out: Path,
    entries: Mapping[str, Figures],
    scored: Mapping[str, datasets.Dataset],
    bundle: TorchBundle,
    model: Path,
) -> None:
    """Write ``report.html`` with the audio that was scored."""
    words = None if bundle.decoder is None else bundle.decoder.language_models.words
    known_words = None
    if words is not None:
        known_words = KnownWords(words=words, source="the words of the language model")
    write_report(
        out / REPORT,
        [read_results(out, entries)],
        metrics=bundle.task.metrics,
        clips=partial(clips_of, scored, bundle.config.sample_rate),
        known_words=known_words,
        notes=[
            f"{model.name}, sbkit {__version__}",
            describe_provenance(provenance_of_bundle(bundle)),
        ],
    )


@contextmanager
def open_model(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[TorchBundle]:
    """Load a bundle, or export a run into a temporary folder first."""
    with as_bundle(model, user_modules) as folder:
        yield load_bundle(folder, user_modules=user_modules)


def _prepare(
    bundle: TorchBundle, model: Path, sources: Sequence[Path], options: ScoreOptions
) -> Iterator[tuple[str, datasets.Dataset]]:
    """Yield each source with its name, prepared like training data; or a run's test sets."""
    names = [source.stem or source.resolve().stem for source in sources]
    if len({*names}) < len(names):
        raise ConfigError(
            "Two of the files have the same name, which their reports would share. Score them one "
            "after the other, each with its own --out."
        )
    if sources:
        for name, source in zip(names, sources, strict=True):
            yield name, prepare_source(bundle, source, options, name)
        return
    if (model / CONFIG_FILE).exists():
        raise ConfigError(
            f"{model} is a bundle, which has no test sets. Name the data: sbkit score BUNDLE "
            "test.csv"
        )
    for name, rows in prepare_test_sets(model).items():
        _require_columns(rows, options, name)
        yield name, rows


def prepare_source(
    bundle: TorchBundle, source: Path, options: ScoreOptions, name: str
) -> datasets.Dataset:
    """Prepare a source like training data; rows without text stay, as in a test set."""
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
        raise ConfigError(
            f"`--label` must name a column with the right answers, but {name} has no "
            f"`{options.label}`. It has {', '.join(columns)}."
        )


def _labeled(rows: datasets.Dataset, bundle: TorchBundle, label: str) -> datasets.Dataset:
    """Return the rows that have a label; raise DataError if the model knows none of the labels."""
    filled, labels = filled_rows(rows, label), bundle.task.labels
    classes = () if labels is None else labels.names(bundle.labels)
    labeled = rows if len(filled) == len(rows) else rows.select(filled)
    if {*classes}.isdisjoint(map(str, labeled[label])):
        raise DataError(
            f"The column `{label}` has none of the model's classes ({', '.join(classes[:10])}) in "
            f"{len(rows)} rows. Fill it, or choose another column with --label."
        )
    return labeled


def score_rows(
    bundle: TorchBundle,
    rows: datasets.Dataset,
    score: Callable[..., list[Any]],
    *,
    title: str = "scoring",
    quiet: bool = False,
) -> list[Any]:
    """Score every utterance, the shortest first; return the results in the order of the rows."""
    results: dict[int, Any] = {}
    with progress_bar(title, float(sample_counts(rows).sum()), quiet=quiet) as advance:
        for batch in read_whole_clips(rows, bundle.config.sample_rate):
            batch_rows = [*batch.values()]
            clips = [row["audio"] for row in batch_rows]
            with naming_audio(", ".join(row["id"] for row in batch_rows[:3])):
                results |= zip(batch, score(batch_rows, clips), strict=True)
            advance(sum(map(len, clips)))
    return [results[row] for row in range(len(rows))]


def _scorer_of(task: Task, options: ScoreOptions) -> Scorer:
    """Return the scorer of a task; raise ConfigError if it has none, or a label is missing."""
    if task.scorer is None:
        raise ConfigError(f"{task.name} cannot be scored: the task has no `scorer`. Add one.")
    if task.scorer.target == "label" and options.label is None:
        raise ConfigError(
            "A classifier needs the column with the right answers: pass --label=language, or "
            "another column of the data."
        )
    return task.scorer

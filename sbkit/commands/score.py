"""`sbkit score`: score a trained model on any data, without training or writing into a run.

The model is a bundle, or a run, which is exported first. The data (tables, folders of Kaldi, saved
datasets) is prepared as for training; whole clips are transcribed or classified, and scored.

The files of `--out`, where SET is the name of a source or test set:

scores.json            the results and their provenance, for `sbkit compare`
report.html            the results as one page with audio
wer_SET.txt            every utterance with its errors, for people
utterances_SET.jsonl   the same for programs
suspicious_SET.tsv     utterances that were recognized as another text with confidence, if any
answers_SET.tsv        the class of every utterance, of a classifier
report_by_SET.tsv      with `--report-by`: the metrics by the values of these columns
"""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import require_writable, to_json, write_text_atomically
from sbkit.base.messages import listed, plural, printable
from sbkit.base.versions import __version__
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import Provenance, describe_provenance, text_settings
from sbkit.checkpoint.run_config import RESOLVED_YAML
from sbkit.config.document import read_document
from sbkit.data.batch import user_columns
from sbkit.data.cache import default_cache
from sbkit.data.shard import read_clips
from sbkit.data.sources import read_manifests
from sbkit.data.splits import filled_rows, prepare_split, read_column, sample_counts
from sbkit.data.spontaneous import TABLE_NAME, read_spontaneous
from sbkit.data.tables import COLUMN_KEYS, TableOptions, is_release, read_release
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.report import REPORT, KnownWords, write_report
from sbkit.evaluate.run_results import read_results
from sbkit.evaluate.settings import SETTINGS, read_records
from sbkit.evaluate.slices import measure_slices, require_columns, slice_columns, write_slices
from sbkit.evaluate.wer import FigureDict
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.export import exported_bundle
from sbkit.export.test_sets import prepare_test_sets, read_whole_clips
from sbkit.lm.seen import SEEN, describe_seen
from sbkit.logs.progress import progress_bar
from sbkit.runtime.model_thread import model_errors_as_bundle_errors
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.tasks.task import Scorer, Task
from sbkit.text.normalizers import named_normalizer
from sbkit.train.evaluation import clips_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SCORES = "scores.json"


def score(options: Namespace) -> None:
    """Score a model on tables, or a run on its test sets; print a line for each.

    Raises SbkitError if the model or a source cannot be read, or if ``options.out`` has scores
    already or cannot be written.
    """
    _check_output(options)
    entries: dict[str, FigureDict] = {}
    scored: dict[str, datasets.Dataset] = {}
    with open_model(options.model, options.user_modules) as loaded:
        bundle = loaded.with_decoder(options.decoder).with_hotwords_option(options.hotwords)
        label = options.label
        scorer = _scorer_of(bundle.task, label)
        score_batch = partial(scorer.score, bundle, label=label, times=options.out is not None)
        if options.normalizer is not None:
            if scorer.target != "text":
                raise ConfigError("`--normalizer` normalizes texts, and this model writes none.")
            score_batch = partial(score_batch, normalizer=named_normalizer(options.normalizer))
        for name, prepared in _prepare(bundle, options):
            rows = _labeled(prepared, bundle, label) if scorer.target == "label" else prepared
            title = f"scoring {name}"
            results = score_rows(bundle, rows, score_batch, title=title, quiet=options.quiet)
            if options.out is not None:
                scored[name] = rows
                entries[name] = _report(name, rows, results, bundle, scorer, options)
            num_empty = len(prepared) - len(rows)
            note = f", without {num_empty} whose {label} is empty" if num_empty else ""
            line = f"{name}: {scorer.describe(results)}, {plural(len(rows), 'utterance')}{note}"
            print(printable(line), flush=True)
            entry = entries.get(name) or with_seen({}, bundle, rows)
            for text in entry.get("notes", []):
                print(printable(f"{name}: {text}"), flush=True)
    if options.out is not None:
        _write_page(options.out, entries, scored, bundle, options.model)
        scores = {
            "model": str(options.model),
            **describe_decoding(bundle),
            SETTINGS: settings_of_model(bundle, options.model),
            PROVENANCE: provenance_of_bundle(bundle),
            "test": entries,
        }
        write_text_atomically(options.out / SCORES, to_json(scores, indent=2) + "\n")


def _check_output(options: Namespace) -> None:
    if options.out is None and options.report_by:
        raise ConfigError("`--report-by` writes tables, so it needs --out DIR. Add it.")
    if options.out is not None:
        if (options.out / SCORES).exists():
            raise ConfigError(
                f"{options.out} already has scores, which are not overwritten. Choose another "
                "folder for --out."
            )
        require_writable(options.out, option="--out")


def table_knobs(options: Namespace) -> dict[str, Any]:
    """Return the encoding of tables that the options name, and the columns, else of the run."""
    knobs: dict[str, Any] = {"encoding": options.encoding}
    declared: Mapping[str, Any] = {}
    if not (options.model / CONFIG_FILE).exists() and (options.model / RESOLVED_YAML).is_file():
        declared = read_document(options.model / RESOLVED_YAML).root
    for name in COLUMN_KEYS:
        option = getattr(options, name)
        knobs[name] = declared.get(name) if option is None else option
    return knobs


def _report(
    name: str,
    rows: datasets.Dataset,
    results: Sequence[object],
    bundle: TorchBundle,
    scorer: Scorer,
    options: Namespace,
) -> FigureDict:
    """Write the reports of a source, and return its figures."""
    report_by: list[str] = options.report_by
    entry: FigureDict = {"utterances": len(rows), **scorer.report(options.out, name, results)}
    entry = with_seen(entry, bundle, rows)
    if report_by:
        values = {column: rows[column][:] for column in report_by if column in rows.column_names}
        rate = bundle.config.sample_rate
        clips = read_clips(rows, range(len(rows)))
        columns = slice_columns(report_by, values, rows["samples"][:], rate, clips)
        entry["report_by"] = measure_slices(report_by, columns, results, scorer.measure)
        write_slices(options.out / f"report_by_{name}.tsv", entry["report_by"])
    return entry


def with_seen(entry: FigureDict, bundle: TorchBundle, rows: datasets.Dataset) -> FigureDict:
    """Add the test sentences that the decoder's language models have seen, if that is known."""
    if bundle.decoder is None:
        return entry
    models = bundle.decoder.language_models
    seen = models.count_seen(read_column(rows, "text"), bundle.config.text_table)
    notes = [*entry.get("notes", []), *map(describe_seen, seen.values())]
    return {**entry, **seen, "notes": notes}


def describe_decoding(bundle: TorchBundle) -> FigureDict:
    """Return the decoder of a recognizer and its hotwords, as plain data."""
    if bundle.task.predicts != "text":
        return {}
    if bundle.decoder is None:
        return {"decoder": GREEDY}
    description: FigureDict = {"decoder": bundle.decoder.decoder_type}
    if bundle.decoder.phrases:
        description["hotwords"] = bundle.decoder.phrases
        description["refused_hotwords"] = bundle.refused_hotwords
    return description


def settings_of_model(bundle: TorchBundle, model: Path) -> FigureDict:
    """Return the settings of a run, or the few that a bundle has, and its decoding."""
    config = bundle.config
    bundle_settings = {"sample_rate": config.sample_rate, "language": config.language}
    settings = read_records(model).get(SETTINGS, bundle_settings)
    decoding = describe_decoding(bundle)
    return {**settings, **({"decoder_type": decoding["decoder"]} if decoding else {})}


def provenance_of_bundle(bundle: TorchBundle) -> Provenance:
    """Return the provenance of a bundle with the chosen decoder."""
    settings = None if bundle.decoder is None else bundle.decoder.plain()
    return {**(bundle.config.provenance or {}), "decoder": text_settings(settings)}


def _write_page(
    out: Path,
    entries: Mapping[str, FigureDict],
    scored: Mapping[str, datasets.Dataset],
    bundle: TorchBundle,
    model: Path,
) -> None:
    words = None if bundle.decoder is None else bundle.decoder.language_models.words
    source = "the words of the language model"
    version = f"{model.name}, sbkit {__version__}"
    seen = [f"{name}: {describe_seen(e[SEEN])}" for name, e in entries.items() if SEEN in e]
    write_report(
        out / REPORT,
        [read_results(out, entries)],
        metrics=bundle.task.metrics,
        clips=partial(clips_of, scored, bundle.config.sample_rate),
        known_words=None if words is None else KnownWords(words=words, source=source),
        notes=[*seen, version, describe_provenance(provenance_of_bundle(bundle))],
    )


@contextmanager
def open_model(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[TorchBundle]:
    """Load a bundle, or export a run into a temporary folder first."""
    with exported_bundle(model, user_modules) as folder:
        yield load_bundle(folder, user_modules=user_modules)


def _prepare(bundle: TorchBundle, options: Namespace) -> Iterator[tuple[str, datasets.Dataset]]:
    """Prepare each source, or else the test sets of a run; yield their rows by name."""
    names = [name_of(source) for source in options.data]
    if len({*names}) < len(names):
        raise ConfigError(
            "Two of the files have the same name, so their reports would overwrite each other. "
            "Score them one after the other, each with its own --out."
        )
    if not names and (options.model / CONFIG_FILE).exists():
        raise ConfigError(
            f"{options.model} is a bundle, which has no test sets. Name the data: sbkit score "
            "BUNDLE test.csv"
        )
    if names and options.split:
        raise ConfigError("--split names a split of the run, so leave out the files, or --split.")
    knobs = table_knobs(options)
    sources = zip(names, options.data, strict=True)
    prepared = ((name, prepare_source(bundle, file, knobs)) for name, file in sources)
    for name, rows in (
        prepared if names else prepare_test_sets(options.model, options.split).items()
    ):
        columns = user_columns(rows.column_names)
        require_columns(options.report_by, {name: columns})
        if options.label and options.label not in columns:
            raise ConfigError(
                f"`--label` must name a column with the right answers, but {name} has no "
                f"`{options.label}`. It has {', '.join(columns)}."
            )
        yield name, rows


def name_of(source: Path) -> str:
    """Return the name of a source in messages and reports: its file or folder without suffix."""
    return source.absolute().stem


def prepare_source(
    bundle: TorchBundle, source: Path, knobs: Mapping[str, Any] = MappingProxyType({})
) -> datasets.Dataset:
    """Prepare a source like a test set: rows without text stay.

    knobs: with the columns and the encoding of a table, if they are not the usual ones.
    """
    language = bundle.config.language or "und"
    scorer = bundle.task.scorer
    has_text = scorer is not None and scorer.target == "text"
    columns = TableOptions.from_knobs(knobs, language, str(source.absolute()))
    columns = columns if has_text else replace(columns, text_column=False)
    if source.suffix == ".tsv" and is_release(source, columns.encoding):
        manifest = read_release(source, columns)
    elif source.match(TABLE_NAME.format("*")):
        manifest = read_spontaneous(source, None, columns)
    else:
        manifest = read_manifests([(source, columns)])
    split = name_of(source)
    prepared = prepare_split(
        manifest,
        split=split,
        normalize=bundle.normalizer() if has_text else str,
        sample_rate=bundle.config.sample_rate,
        cache_folder=default_cache(),
        keep_empty=True,
    )
    excluded = sorted(prepared.excluded, key=lambda row: row.reason)
    for reason, rows in groupby(excluded, key=lambda row: row.reason):
        ids = [row.id for row in rows]
        logger.warning(printable(f"{split}: {len(ids)} left out, {reason}: {listed(ids)}"))
    return prepared.dataset


def _labeled(rows: datasets.Dataset, bundle: TorchBundle, label: str) -> datasets.Dataset:
    """Select the rows that have a label; raise DataError if the model knows none of the labels."""
    filled = filled_rows(rows, label)
    labels = bundle.task.labels
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
    score: Callable[..., list[Result]],
    *,
    title: str = "scoring",
    quiet: bool = False,
) -> list[Result]:
    """Score every utterance, the shortest first; return the results in the order of the rows."""
    results: dict[int, Result] = {}
    with progress_bar(title, float(sample_counts(rows).sum()), quiet=quiet) as advance:
        for batch in read_whole_clips(rows, bundle.config.sample_rate):
            batch_rows = [*batch.values()]
            clips = [row["audio"] for row in batch_rows]
            with model_errors_as_bundle_errors(", ".join(row["id"] for row in batch_rows[:3])):
                results |= zip(batch, score(batch_rows, clips), strict=True)
            advance(sum(map(len, clips)))
    return [results[row] for row in range(len(rows))]


def _scorer_of(task: Task, label: str | None) -> Scorer:
    """Return the scorer of a task; raise ConfigError if it has none, or a label is missing."""
    if task.scorer is None:
        raise ConfigError(f"{task.name} cannot be scored: the task has no `scorer`. Add one.")
    if task.scorer.target == "label" and label is None:
        raise ConfigError(
            "A classifier needs the column with the right answers: pass --label=language, or "
            "another column of the data."
        )
    return task.scorer

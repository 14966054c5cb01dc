"""Score the model of a bundle on test sets, and write the reports.

rows of a test set -> batches of whole clips -> the results of the task's scorer (`ScoredSet`)
-> the reports of the set -> `scores.json` and `report.html` of all sets
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.messages import plural
from sbkit.base.versions import __version__
from sbkit.checkpoint.provenance import Provenance, describe_provenance, text_settings
from sbkit.data.shard import read_clips
from sbkit.data.splits import filled_rows, read_column, sample_counts
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.report import REPORT, KnownWords, write_report
from sbkit.evaluate.run_results import SCORES, read_results
from sbkit.evaluate.settings import SETTINGS, read_records
from sbkit.evaluate.slices import measure_slices, slice_columns, write_slices
from sbkit.evaluate.wer import FigureDict
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.lm.seen import SEEN, describe_seen
from sbkit.logs.progress import progress_bar
from sbkit.runtime.model_thread import model_errors_as_bundle_errors
from sbkit.runtime.test_sets import read_whole_clips
from sbkit.runtime.torch_model import TorchBundle
from sbkit.tasks.task import Scorer, Task
from sbkit.text.normalizers import named_normalizer
from sbkit.train.evaluation import clips_of

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """A test set, and the results of its rows in their order.

    Attributes:
        line: the metrics, for the screen.
        seen: how much of the texts the decoder's language models have seen, with `notes`.
    """

    name: str
    rows: datasets.Dataset
    results: Sequence[Any]
    line: str
    seen: FigureDict


class BundleScorer:
    """Scores a bundle on one test set after the other.

    Args:
        label: the column with the right answers, of a classifier.
        normalizer: the name of a normalizer of texts, for a second comparison.
        report_by: columns that slice the test sets.
        times: whether words are timed, for the reports.

    Raises:
        ConfigError: the task has no scorer, or an option does not fit it.
    """

    def __init__(
        self,
        bundle: TorchBundle,
        *,
        label: str | None = None,
        normalizer: str | None = None,
        report_by: Sequence[str] = (),
        times: bool = True,
    ) -> None:
        self._bundle = bundle
        self._label = label
        self._report_by = report_by
        self._scorer = _scorer_of(bundle.task, label)
        self._score_batch = partial(self._scorer.score, bundle, label=label, times=times)
        if normalizer is not None:
            if self._scorer.target != "text":
                raise ConfigError("`--normalizer` normalizes texts, and this model writes none.")
            named = named_normalizer(normalizer)
            self._score_batch = partial(self._score_batch, normalizer=named)

    def score(self, name: str, rows: datasets.Dataset, *, quiet: bool = False) -> ScoredSet:
        """Score a test set, the shortest clips first; rows without the label are left out."""
        labeled = rows
        if self._label is not None and self._scorer.target == "label":
            labeled = _labeled(rows, self._bundle, self._label)
        results = score_rows(
            self._bundle, labeled, self._score_batch, title=f"scoring {name}", quiet=quiet
        )
        num_empty = len(rows) - len(labeled)
        note = f", without {num_empty} whose {self._label} is empty" if num_empty else ""
        counted = plural(len(labeled), "utterance")
        line = f"{name}: {self._scorer.describe(results)}, {counted}{note}"
        seen = _count_seen(self._bundle, labeled)
        return ScoredSet(name=name, rows=labeled, results=results, line=line, seen=seen)

    def report(self, scored: ScoredSet, folder: Path) -> FigureDict:
        """Write the reports of a test set, and return its figures."""
        rows = scored.rows
        figures = self._scorer.report(folder, scored.name, scored.results)
        notes = [*figures.get("notes", []), *scored.seen.get("notes", [])]
        entry: FigureDict = {"utterances": len(rows), **figures, **scored.seen}
        if self._bundle.decoder is not None:
            entry["notes"] = notes
        if self._report_by:
            present = [column for column in self._report_by if column in rows.column_names]
            values = {column: rows[column][:] for column in present}
            clips = read_clips(rows, range(len(rows)))
            rate = self._bundle.config.sample_rate
            columns = slice_columns(self._report_by, values, rows["samples"][:], rate, clips)
            slices = measure_slices(self._report_by, columns, scored.results, self._scorer.measure)
            write_slices(folder / f"report_by_{scored.name}.tsv", slices)
            entry["report_by"] = slices
        return entry

    def write(
        self,
        folder: Path,
        rows: Mapping[str, datasets.Dataset],
        entries: Mapping[str, FigureDict],
        model: Path,
    ) -> None:
        """Write `scores.json` and the page of all test sets.

        rows, entries: of each set; model: what was scored.
        """
        bundle = self._bundle
        words = None if bundle.decoder is None else bundle.decoder.language_models.words
        source = "the words of the language model"
        version = f"{model.name}, sbkit {__version__}"
        seen = [
            f"{name}: {describe_seen(entry[SEEN])}"
            for name, entry in entries.items()
            if SEEN in entry
        ]
        provenance = _provenance_of(bundle)
        write_report(
            folder / REPORT,
            [read_results(folder, entries)],
            metrics=bundle.task.metrics,
            clips=partial(clips_of, rows, bundle.config.sample_rate),
            known_words=None if words is None else KnownWords(words=words, source=source),
            notes=[*seen, version, describe_provenance(provenance)],
        )
        scores = {
            "model": str(model),
            **describe_decoding(bundle),
            SETTINGS: _settings_of(bundle, model),
            PROVENANCE: provenance,
            "test": entries,
        }
        write_text_atomically(folder / SCORES, to_json(scores, indent=2) + "\n")


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


def _settings_of(bundle: TorchBundle, model: Path) -> FigureDict:
    """Return the settings of a run, or the few that a bundle has, and its decoding."""
    config = bundle.config
    bundle_settings = {"sample_rate": config.sample_rate, "language": config.language}
    settings = read_records(model).get(SETTINGS, bundle_settings)
    decoding = describe_decoding(bundle)
    return {**settings, **({"decoder_type": decoding["decoder"]} if decoding else {})}


def _provenance_of(bundle: TorchBundle) -> Provenance:
    """Return the provenance of a bundle with the chosen decoder."""
    settings = None if bundle.decoder is None else bundle.decoder.plain()
    return {**(bundle.config.provenance or {}), "decoder": text_settings(settings)}


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


def _count_seen(bundle: TorchBundle, rows: datasets.Dataset) -> FigureDict:
    """Count the sentences that the decoder's language models have seen; {} if it has none."""
    if bundle.decoder is None:
        return {}
    models = bundle.decoder.language_models
    seen = models.count_seen(read_column(rows, "text"), bundle.config.text_table)
    return {**seen, "notes": [*map(describe_seen, seen.values())]}


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

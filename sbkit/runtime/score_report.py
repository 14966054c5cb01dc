"""Report a test: figures and files of each test set, `summary.json`, and `report.html`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch

from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.machine import cpu_name, usable_cores
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import git_commit, versions
from sbkit.bundle.task import Figures, Labels, Task
from sbkit.data.data_report import encode_clips
from sbkit.distributed.ranks import gather_on_rank0
from sbkit.evaluate.intervals import group_by_speaker, intervals_of, plain_intervals
from sbkit.evaluate.report import MAX_HEARD_SECONDS, REPORT, write_report
from sbkit.evaluate.run_results import DATA_REPORT, SUMMARY, read_json
from sbkit.evaluate.slices import LENGTH, length_group, measure_slices, write_slices
from sbkit.evaluate.wer import ErrorCounts, FigureDict
from sbkit.evaluate.wer_report import utterances_file
from sbkit.logs.curves import CURVES
from sbkit.logs.metric import Metrics, describe_values
from sbkit.logs.progress import ping, progress_bar


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """A test set, and the results of its rows in order; rank 0 has the results of all ranks."""

    name: str
    rows: datasets.Dataset
    results: Sequence[Any]

    @classmethod
    def gather(cls, name: str, rows: datasets.Dataset, results: Mapping[int, Any]) -> "ScoredSet":
        """Collect the results of all ranks, by row, on rank 0, which writes the report."""
        shares = gather_on_rank0(results)
        by_row = {row: result for share in shares for row, result in share.items()}
        scored = sorted(by_row)
        if len(scored) < len(rows):
            rows = rows.select(scored)
        return cls(name=name, rows=rows, results=[by_row[row] for row in scored])


class ScoreReport:
    """Write the results of test sets into a folder, one set after the other.

    folder: gets the files of each set, `summary.json` and `report.html`.
    metrics: the metrics of the task, and further ones of the recipe's Brain.
    measure: returns their values.
    report_by: columns that slice the test sets.
    """

    __test__ = False  # pytest must not collect this class

    def __init__(
        self,
        folder: Path,
        task: Task,
        *,
        sample_rate: int,
        labels: Labels = None,
        metrics: Metrics | None = None,
        measure: Callable[[Sequence[Any]], Mapping[str, float]] | None = None,
        report_by: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.figures: dict[str, Figures] = {}  # what the task's `figures` returned, by test set
        self.entries: dict[str, FigureDict] = {}  # entries of `summary.json`, by test set
        self._task = task
        self._metrics = metrics or task.metrics
        self._measure = measure or task.measure
        self._labels = labels
        self._rate = sample_rate
        self._report_by = report_by
        self._sets: dict[str, ScoredSet] = {}

    def describe(self, scored: ScoredSet) -> str:
        """Return a line about a test set: its figures, metrics of the Brain, and its size."""
        values = self._measure(scored.results)
        texts: list[str] = []
        self._measure_set(scored)
        if line := self._task.describe(self.figures[scored.name]):
            texts.append(line)
            names = self._metrics.keys() - self._task.metrics.keys()
            values = {name: value for name, value in values.items() if name in names}
        texts += describe_values(self._metrics, values)
        size = plural(len(scored.results), "utterance")
        return f"{scored.name}: {', '.join(texts)}, {size}"

    def add(self, scored: ScoredSet, **facts: Any) -> FigureDict:
        """Write the files of a test set, and return its figures together with further facts."""
        task, results, rows = self._task, scored.results, scored.rows
        self._measure_set(scored)
        entry, figures = self.entries[scored.name], self.figures[scored.name]
        entry |= task.report(self.folder, scored.name, results, figures, self._labels) or {}
        notes = [*entry.get("notes", ()), *facts.get("notes", ())]
        entry |= facts | ({"notes": notes} if notes else {})
        if self._report_by:
            seconds = (samples_to_seconds(count, self._rate) for count in rows["samples"][:])
            columns = {LENGTH: [*map(length_group, seconds)]}  # unless the data has it
            columns |= {
                name: rows[name][:] for name in self._report_by if name in rows.column_names
            }
            slices = measure_slices(
                {name: columns[name] for name in self._report_by},
                results,
                lambda part: task.slice_figures(part) or self._measure(part),
            )
            write_slices(self.folder / f"report_by_{scored.name}.tsv", slices)
            entry["report_by"] = slices
        self._sets[scored.name] = scored
        return entry

    def _measure_set(self, scored: ScoredSet) -> None:
        """Measure a test set, once."""
        if scored.name in self.entries:
            return
        rows, results = scored.rows, scored.results
        speakers = rows["speaker"][:] if "speaker" in rows.column_names else [""] * len(rows)
        counts = {
            name: [ErrorCounts(part, reference_length=n) for part, n in map(metric.counts, results)]
            for name, metric in self._metrics.items()
            if metric.counts
        }
        intervals = intervals_of(counts, group_by_speaker(rows["id"][:], speakers))
        figures = self._task.figures(results)
        self.figures[scored.name] = figures
        self.entries[scored.name] = {
            **self._measure(results),
            "utterances": len(results),
            **plain_intervals(intervals),
            **(figures if isinstance(figures, Mapping) else figures.plain()),
        }

    @property
    def notes(self) -> list[str]:
        """The notes about each test set."""
        return [
            f"{name}: {note}"
            for name, entry in self.entries.items()
            for note in entry.get("notes", ())
        ]

    def write(self, *, notes: Sequence[str], device: str, **facts: Any) -> None:
        """Write the page and the summary of all test sets.

        notes: lines about the model, for the page.
        device: where the model was tested.
        facts: about the model and its training, for the summary.
        """
        folder = self.folder
        utterances = {
            name: scored.results
            for name, scored in self._sets.items()
            if utterances_file(folder, name).exists()
        }
        write_report(
            folder / REPORT,
            title="/".join(folder.absolute().parts[-3:]),
            test=self.entries,
            utterances=utterances,
            data=read_json(folder / DATA_REPORT),
            clips=self._encode_clips,
            metrics=self._metrics,
            pictures=[
                *folder.glob(CURVES),
                *(p for name in self.entries for p in sorted(folder.glob(f"*_{name}.png"))),
            ],
            notes=[*self.notes, *notes],
        )
        accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
        summary = {
            "test": self.entries,
            **facts,
            "versions": versions(),
            "git_commit": git_commit(Path(__file__).parent),
            "machine": {
                "cpu": cpu_name(),
                "cores": usable_cores(),
                "device": device,
                "accelerator": accelerator,
            },
        }
        write_text_atomically(folder / SUMMARY, to_json(summary, indent=2) + "\n")

    def _encode_clips(self, name: str, ids: Sequence[str], max_characters: int) -> dict[str, str]:
        with progress_bar("writing clips", len(ids)) as advance:

            def watched_ids() -> Iterator[str]:
                for id in ids:
                    ping("report", [id])  # even if it asks to stop, the report is finished
                    advance(1)
                    yield id

            return encode_clips(
                self._sets[name].rows,
                watched_ids(),
                sample_rate=self._rate,
                max_seconds=MAX_HEARD_SECONDS,
                max_characters=max_characters,
            )

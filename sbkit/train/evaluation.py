"""The evaluation of splits: a recipe's hooks, the results of every utterance, and their report.

`Brain` runs the batches; an `Evaluator` keeps their results and measures them by the hooks.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow.compute as pc
import torch

from sbkit.base.messages import plural
from sbkit.base.versions import __version__
from sbkit.checkpoint.provenance import describe_provenance, provenance_of_run
from sbkit.data.batch import Loaders
from sbkit.data.report import encode_clips
from sbkit.data.splits import Splits, take_columns
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.report import MAX_CLIP_SECONDS, REPORT, KnownWords, write_report
from sbkit.evaluate.run_results import SUMMARY, read_results, write_summary
from sbkit.evaluate.slices import measure_slices, write_slices
from sbkit.logs.curves import draw_curves
from sbkit.logs.metric import LOSS, Metrics, describe_values
from sbkit.logs.run_log import LOG_FILE, RunLog, SplitFigures
from sbkit.models.loss import Loss

logger = logging.getLogger(__name__)

Results = Mapping[str, list[Any]]  # by split, one for every utterance


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What may keep a run from learning, and what to try."""

    key: str  # of the YAML
    problem: str  # a sentence without its period
    fix: str
    is_evident: bool = False  # whether the settings or the data of the run show the problem


class EvaluationHooks:
    """Hooks that measure a recipe; without `metrics` it is measured by its loss.

    Attributes:
        metrics: the metrics that `measure` computes; the first one ranks checkpoints. They belong
            to the class: an instance may have a SpeechBrain recipe's own attribute of that name.
        evaluates_segments: whether a recording longer than `eval_batch_seconds` is evaluated in
            segments.
    """

    metrics: ClassVar[Metrics] = {}
    evaluates_segments: ClassVar[bool] = False

    def score(self, outputs: Any, batch: Any) -> Sequence[Any]:
        """Return a result for every utterance of an evaluated batch, as plain data."""
        raise NotImplementedError("a Brain with `metrics` defines `score`")

    def measure(self, results: Sequence[Any]) -> Mapping[str, float]:
        """Return the value of each of `metrics` over the results of a split."""
        if type(self).metrics:
            raise NotImplementedError("a Brain with `metrics` defines `measure`")
        loss_sum = math.fsum(loss_sum for loss_sum, _ in results)
        count = math.fsum(count for _, count in results)
        return {"loss": loss_sum / count if count else math.nan}

    def measure_slice(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """Return the figures of a slice of a test set; a recipe may add counts and intervals."""
        return self.measure(results)

    def describe(self, results: Sequence[Any]) -> str:
        """Write the metrics of a test set for the screen; a recipe may add the counts."""
        return ", ".join(describe_values(type(self).metrics or LOSS, self.measure(results)))

    def report(self, split: str, results: Sequence[Any], folder: Path) -> Mapping[str, Any]:
        """Write a test set's report into the run folder; return its entry in `summary.json`."""
        return self.measure(results)

    def advise(self, values: Mapping[str, float]) -> str | None:
        """Return advice, to be logged once, if a validation shows that the run does not learn."""
        return None

    def likely_causes(self) -> Sequence[Cause]:
        """Return what may keep the run from learning, once it has loaders and optimizers."""
        return ()

    def seconds_after_training(self, test_share: float) -> float:
        """Estimate the seconds of the recipe's own work after the last epoch.

        test_share: the size of the test sets as a share of the validation sets.
        """
        return 0.0


@dataclass(frozen=True, kw_only=True)
class TestedModel:
    """Facts about the run for the report of a test."""

    folder: Path
    step: int
    epoch: int
    num_parameters: int
    num_averaged: int  # checkpoints whose mean was tested
    train_seconds: float  # wall time
    audio_seconds: float  # trained on
    device: torch.device
    splits: Splits | None  # None if unknown
    sample_rate: int  # Hz, of the clips
    report_by: Sequence[str]  # columns that slice the test sets
    watch: Callable[[Iterable[str]], Iterable[str]]  # yields the ids of clips, and pings

    @property
    def weights(self) -> str:
        """The tested weights in words."""
        if self.num_averaged > 1:
            return f"mean of {self.num_averaged} checkpoints"
        return "best checkpoint"


class Evaluator:
    """Keep the results of evaluated splits, and measure them by a recipe's hooks.

    Attributes:
        metrics: the metrics of the hooks; the loss if they have none.
        results: by split, the results of `score`; without metrics the sum and count of each loss.
        columns: by split, the values of the columns of `report_by`.

    >>> evaluator = Evaluator(EvaluationHooks())
    >>> evaluator.start(["dev"])
    >>> evaluator.enter("dev")
    >>> evaluator.add([(6.0, 3.0), (2.0, 1.0)])
    >>> evaluator.measure_splits()
    {'loss': 2.0}
    """

    def __init__(self, hooks: EvaluationHooks) -> None:
        self._hooks = hooks
        self.metrics: Metrics = type(hooks).metrics or LOSS
        self.start(())

    def start(self, splits: Iterable[str]) -> None:
        """Forget earlier results, and expect the results of some splits."""
        self.results: dict[str, list[Any]] = defaultdict(list, {name: [] for name in splits})
        self.columns: dict[str, list[Any]] = defaultdict(list, {name: [] for name in splits})
        self._split = ""

    def enter(self, split: str) -> None:
        """Add the results that follow to a split."""
        self._split = split

    def add(self, results: Iterable[Any]) -> None:
        """Keep the results of a batch of the present split."""
        self.results[self._split].extend(results)

    def add_columns(self, rows: Iterable[Any]) -> None:
        """Keep the values of the columns of `report_by` for a batch of the present split."""
        self.columns[self._split].extend(rows)

    # -- measuring ------------------------------------------------------------------------------

    def measure(self, results: Sequence[Any]) -> dict[str, float]:
        """Return the values of the hook `measure`, the metric that ranks checkpoints first."""
        values = {name: float(value) for name, value in self._hooks.measure(results).items()}
        best = next(iter(self.metrics))
        return {best: values[best], **values}

    def measure_splits(self) -> dict[str, float]:
        """Measure all utterances of all ranks and, if there are several splits, each split.

        The metrics of a split are named like `dev-clean/WER`. Every rank calls this.
        """
        results = gather_results(self.results)
        values = self.measure([result for split in results.values() for result in split])
        if len(results) > 1:
            for split, its_results in results.items():
                measured = self.measure(its_results)
                values |= {f"{split}/{name}": value for name, value in measured.items()}
        return values

    def error(self) -> float:
        """Return the metric that ranks checkpoints, negated if higher is better."""
        name, metric = next(iter(self.metrics.items()))
        value = self.measure_splits()[name]
        return value if metric.lower_is_better else -value

    def describe(self, results: Sequence[Any]) -> str:
        """Write what the hook `describe` returns, then metrics that a subclass has added."""
        kind = type(self._hooks)
        owner: Any = next(base for base in kind.__mro__ if "describe" in vars(base))
        added = kind.metrics.keys() - owner.metrics.keys() if owner.metrics else ()
        values = {name: v for name, v in self.measure(results).items() if name in added}
        return ", ".join([self._hooks.describe(results), *describe_values(kind.metrics, values)])

    # -- the report of a test -------------------------------------------------------------------

    def report(self, model: TestedModel | None) -> None:
        """Write the reports of the test sets, the summary and the curves; print the scores.

        Every rank calls this. Nothing is written if ``model`` is None.
        """
        results, columns = gather_results(self.results), gather_results(self.columns)
        if rank() > 0 or model is None:
            return
        values = {split: self.measure(its_results) for split, its_results in results.items()}
        entries = {
            split: {**values[split], **(self._hooks.report(split, its_results, model.folder) or {})}
            for split, its_results in results.items()
        }
        _log_test(model, values, {split: entry.get("decoder") for split, entry in entries.items()})
        if model.report_by:
            for split, its_results in results.items():
                slices = measure_slices(
                    model.report_by, columns[split], its_results, self._hooks.measure_slice
                )
                write_slices(model.folder / f"report_by_{split}.tsv", slices)
                entries[split]["report_by"] = slices
        notes = [f"{split}: {note}" for split, e in entries.items() for note in e.get("notes", [])]
        provenance = provenance_of_run(model.folder)
        size = f"{model.num_parameters / 1e6:.1f} M parameters"
        facts = f"{size}, {model.weights}, sbkit {__version__}"
        self._write_page(model, entries, [*notes, facts, describe_provenance(provenance)])
        write_summary(
            model.folder / SUMMARY,
            test=entries,
            parameters=model.num_parameters,
            train_seconds=model.train_seconds,
            audio_seconds=model.audio_seconds,
            device=model.device,
            provenance=provenance,
        )
        draw_curves(model.folder / LOG_FILE, model.folder / "curves.png", self.metrics)
        nouns = ("utterance",) if type(self._hooks).metrics else ("loss", "losses")
        for split, its_results in results.items():
            count = plural(len(its_results), *nouns)
            logger.info(f"{split}: {self.describe(its_results)}, {count}, {model.weights}")
        for note in notes:
            logger.info(note)

    def _write_page(
        self, model: TestedModel, entries: dict[str, dict[str, Any]], notes: Sequence[str]
    ) -> None:
        folder, splits = model.folder, model.splits
        run_results = read_results(folder, entries)

        def encode(name: str, ids: list[str], max_characters: int) -> dict[str, str]:
            tests = splits.test if splits else {}
            return clips_of(tests, model.sample_rate, name, model.watch(ids), max_characters)

        write_report(
            folder / REPORT,
            [run_results],
            clips=encode,
            metrics=self.metrics,
            known_words=_training_words(splits.train)
            if splits and run_results.utterances
            else None,
            pictures=[file for split in entries for file in sorted(folder.glob(f"*_{split}.png"))],
            notes=notes,
        )


def _log_test(
    model: TestedModel,
    values: Mapping[str, Mapping[str, float]],
    decoders: Mapping[str, str | None],
) -> None:
    position: dict[str, Any] = {"epoch": model.epoch, "step": model.step}
    run_log = RunLog(model.folder, resume_step=model.step)
    for split, metrics in values.items():
        figures = SplitFigures(**position, split=split, metrics=metrics, decoder=decoders[split])
        run_log.write(figures)
    run_log.close()


def gather_results(results: Results) -> dict[str, list[Any]]:
    """Collect the results of every rank, on every rank."""
    per_rank: list[Results] = gather_over_ranks(dict(results))
    return {split: [row for share in per_rank for row in share[split]] for split in results}


def mean_over_ranks(losses: Sequence[Loss]) -> float:
    """Divide the exact sum of all losses by all counts, however the ranks share the batches."""
    sums = [value for loss in losses for value in loss.sums.tolist()]
    counts = [value for loss in losses for value in loss.counts.tolist()]
    per_rank = gather_over_ranks((sums, counts))
    total = math.fsum(value for sums, _ in per_rank for value in sums)
    labels = math.fsum(value for _, counts in per_rank for value in counts)
    return total / labels if labels else math.nan


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader; None if it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def seconds_after_training(
    hooks: EvaluationHooks, loaders: Loaders | None, *, num_averaged: int, validation: float
) -> float:
    """Estimate the seconds after the last epoch: averaging, the recipe's own work, and tests.

    Args:
        hooks: the hooks of the recipe.
        loaders: the loaders of the run; None if it is unknown whether a test follows `fit`.
        num_averaged: the number of checkpoints that may be averaged.
        validation: the seconds of one validation.
    """
    if loaders is None:
        return 0.0
    num_valid, num_test = (
        sum(length_of(loader) or 0 for loader in by_split.values())
        for by_split in (loaders.valid, loaders.test)
    )
    num_means = num_averaged.bit_length() if num_averaged > 1 else 0  # each is validated
    test_share = num_test / max(num_valid, 1)
    own_seconds = float(hooks.seconds_after_training(test_share))
    return validation * (num_means + test_share) + own_seconds


def clips_of(
    splits: Mapping[str, datasets.Dataset],
    sample_rate: int,
    name: str,
    ids: Iterable[str],
    max_characters: int,
) -> dict[str, str]:
    """Return clips of a test set in base64, by id; ``max_characters`` limits them together."""
    if name not in splits:
        return {}
    return encode_clips(
        splits[name],
        ids,
        sample_rate=sample_rate,
        max_seconds=MAX_CLIP_SECONDS,
        max_characters=max_characters,
    )


def _training_words(train: datasets.Dataset) -> KnownWords:
    texts = take_columns(train, "text")["text"].combine_chunks()
    words = pc.unique(pc.list_flatten(pc.utf8_split_whitespace(texts)))
    return KnownWords(
        words=frozenset(words.to_pylist()), source="the words of the training transcripts"
    )

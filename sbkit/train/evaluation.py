"""The end of an evaluation: results of all ranks, metrics of every split, and what is reported."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.curves import draw_curves
from sbkit.logs.log import LOG_FILE, FinalFigures, RunLog, say
from sbkit.logs.metric import Metrics
from sbkit.logs.summary import write_summary
from sbkit.models.loss import Loss
from sbkit.train.cost import SUMMARY

Results = dict[str, list[Any]]  # of each split, one for every utterance


@dataclass(frozen=True)
class BestKeys:
    """The metrics by which checkpoints are kept, as SpeechBrain's Checkpointer takes them."""

    max_keys: tuple[str, ...]
    min_keys: tuple[str, ...]


def best_keys(metrics: Metrics) -> BestKeys:
    """Name the first metric, by which the best checkpoint is chosen, with its direction."""
    name, metric = next(iter(metrics.items()))
    return BestKeys((), (name,)) if metric.lower_is_better else BestKeys((name,), ())


def mean_over_ranks(losses: Iterable[Loss]) -> float:
    """Divide all sums by all counts, the same to the last digit however they were shared out."""
    losses = list(losses)
    sums = [value for loss in losses for value in loss.sums.tolist()]
    counts = [value for loss in losses for value in loss.counts.tolist()]
    everyone = gather_over_ranks((sums, counts))
    total = math.fsum(value for sums, _ in everyone for value in sums)
    labels = math.fsum(value for _, counts in everyone for value in counts)
    return total / labels if labels else math.nan


def gather_results(results: Results) -> Results:
    """Collect the results of every rank, on every rank."""
    everyone: list[Results] = gather_over_ranks(results)
    return {name: [each for share in everyone for each in share[name]] for name in results}


def measure_splits(
    measure: Callable[[Sequence[Any]], Mapping[str, float]], results: Results
) -> dict[str, float]:
    """Compute the metrics over all utterances and, where there are several splits, of each.

    Those of a split are named `dev-clean/WER`.
    """
    values = dict(measure([each for split in results.values() for each in split]))
    if len(results) > 1:
        for name, each in results.items():
            values |= {f"{name}/{metric}": value for metric, value in measure(each).items()}
    return values


def report_test(brain: Any, results: Results) -> None:
    """Write the reports of the test sets, the summary and the curves; print the scores."""
    if rank() > 0:
        return
    folder = Path(brain.hparams.output_folder)
    values = {name: brain.measure(each) for name, each in results.items()}
    log = RunLog(folder, resume_step=brain.optimizer_step)
    epochs, step = brain.hparams.epoch_counter.limit, brain.optimizer_step
    for name, metrics in values.items():
        log.write(FinalFigures(epoch=epochs, step=step, split=name, metrics=metrics))
    log.close()
    entries = {name: brain.report(name, each, folder) for name, each in results.items()}
    write_summary(
        folder / SUMMARY,
        test=entries,
        parameters=sum(each.numel() for each in brain.modules.parameters()),
        train_seconds=brain.training_metrics.train_seconds,
        audio_seconds=brain.training_metrics.audio_seconds,
        device=brain.device,
        cost=brain.cost.summary(folder, brain.optimizers_dict or {}),
    )
    draw_curves(folder / LOG_FILE, folder / "curves.png", brain.metrics)
    for name, each in results.items():
        say(f"{name}: {brain.describe(each)}, {len(each)} utterances")

"""Measure the recognizer that a run starts from, before the first step.

`init_from` or `pretrained` -> a bundle -> scores on the validation and test sets -> a file of the
run folder, from which the log, the summary and the report quote them at the end
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import datasets
import torch

from sbkit.base.errors import BundleError, SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.threads_and_memory import return_freed_memory
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import CONFIG_FILE
from sbkit.bundle.task import Figures, Task
from sbkit.checkpoint.rng import preserve_rng
from sbkit.checkpoint.run_config import has_checkpoint
from sbkit.distributed.ranks import rank, rank0_then_others
from sbkit.evaluate.run_results import BEFORE_TRAINING, BUNDLE_CONFIG, read_json
from sbkit.evaluate.wer_report import TextFigures
from sbkit.logs.metric import Metrics, best_key, percent
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_report import ScoreReport
from sbkit.runtime.score_sets import batch_seconds_of
from sbkit.runtime.scoring import BundleScorer
from sbkit.runtime.torch_model import TorchModel
from sbkit.runtime.transformers_folder import require_recognizer
from sbkit.train.brain import Brain
from sbkit.train.initialize import PRETRAINED, init_folders, pretrained_folder
from sbkit.train.setup import PreparedRun, user_modules_of

logger = logging.getLogger(__name__)


def measure_start(run: PreparedRun, brain: Brain) -> None:
    """Score the recognizer that a run starts from, if it does; write and log the figures."""
    folder, splits = run.spec.folder, run.loaders.splits
    if has_checkpoint(folder) or run.recipe.task.predicts != "text":
        return
    with rank0_then_others():
        (folder / BEFORE_TRAINING).unlink(missing_ok=True)  # that of an earlier start
    start = find_start(run)
    if start is None:
        return
    with brain.guarded(), preserve_rng(brain.device):
        brain.ping("test")
        try:
            bundle = _open_start(start, run, brain)
        except SbkitError as error:
            logger.info(f"note: what this run starts from is not measured. {error}")
            return
        if bundle is None:
            return
        rewrite = run.recipe.task.normalizer(bundle.config.text_table, run.labels)
        report = score_splits(run, brain, bundle, splits.evaluated(), rewrite)
        del bundle
        return_freed_memory()
        torch.cuda.empty_cache()  # without CUDA it does nothing
    if rank() == 0:
        text = to_json(report.entries, indent=2)
        write_text_atomically(folder / BEFORE_TRAINING, f"{text}\n")
        for line in describe_start(run.recipe.task, report.figures):
            logger.info(line)


def score_splits(
    run: PreparedRun,
    brain: Brain,
    bundle: Bundle[TorchModel],
    sets: Mapping[str, datasets.Dataset],
    rewrite: Callable[[str], str] | None = None,
) -> ScoreReport:
    """Measure validation or test sets; only on rank 0 the report has figures."""
    seconds, splits = batch_seconds_of(run.spec.settings), run.loaders.splits
    scorer = BundleScorer(bundle, times=False, batch_seconds=seconds, rewrite=rewrite)
    rate = bundle.config.sample_rate
    report = ScoreReport(run.spec.folder, bundle.task, sample_rate=rate)
    for name, rows in sets.items():
        as_tested = splits.as_tested if name in splits.test else None
        count = brain.max_evaluated_batches
        scored = scorer.score(name, rows, as_tested=as_tested, max_batches=count)
        brain.stop_if_signaled()
        if rank() == 0:
            report.describe(scored)  # computes the figures
    return report


def find_start(run: PreparedRun) -> dict[str, Any] | None:
    """Return the folder of the model that a run starts from, with options of `load_bundle`.

    Returns None for random weights, several models, or an encoder alone.
    """
    settings = run.spec.settings
    folders = init_folders(settings)
    for file in (CONFIG_FILE, BUNDLE_CONFIG):
        if len(folders) == 1 and (config := folders[0] / file).exists():
            return {"folder": config.parent, "user_modules": user_modules_of(run.spec)}
    if not folders and settings.get(PRETRAINED) and settings.get("decoder_task") != "translate":
        with suppress(SbkitError):  # it may be gone at the end of a run
            folder = pretrained_folder(settings)
            require_recognizer(folder)
            return {"folder": folder, "language": settings["language"]}
    return None


def _open_start(
    start: Mapping[str, Any], run: PreparedRun, brain: Brain
) -> Bundle[TorchModel] | None:
    """Open the model of `find_start` with the run's text table; None if it writes no texts."""
    settings = run.spec.settings
    precision = settings["eval_precision"]
    bundle: Bundle[TorchModel] = load_bundle(**start, device=brain.device, precision=precision)
    if bundle.task.predicts != "text":
        return None
    rate, language = bundle.config.sample_rate, settings["language"]
    if rate != settings["sample_rate"]:
        raise BundleError(f"{start['folder']} has a sample rate of {rate} Hz.")
    table = run.splits.text_table(settings)
    # Whisper writes digits: if numbers are spelled, they are so in the references, too.
    table = replace(table, numbers=table.numbers or bundle.config.text_table.numbers)
    return replace(bundle, config=replace(bundle.config, language=language, normalizer=table))


def read_start(run: PreparedRun) -> dict[str, Figures]:
    """Return the figures of the sets that were scored before training, by their names."""
    plain: Mapping[str, Any] = read_json(run.spec.folder / BEFORE_TRAINING) or {}
    return {name: run.recipe.task.read_figures(figures) for name, figures in plain.items()}


def describe_start(task: Task, before: Mapping[str, Figures]) -> Iterator[str]:
    """Yield a line about each set that was scored before training."""
    for name, figures in before.items():
        yield f"before training: {name}: {task.describe(figures)}"


def describe_worse(
    metrics: Metrics, before: Mapping[str, TextFigures], after: Mapping[str, TextFigures]
) -> Iterator[str]:
    """Yield a sentence about each test set that has more errors after training than before.

    metrics: those of the task, of which the first one ranks.
    """
    rate = best_key(metrics).name
    for name, figures in after.items():
        start_figures = before.get(name)
        if start_figures is None or rate not in figures.counts:
            continue
        if figures.counts[rate].rate > start_figures.counts[rate].rate:
            yield (
                f"{name}: the run ends worse than it began: {rate} "
                f"{_with_interval(rate, figures)}, before training "
                f"{_with_interval(rate, start_figures)}."
            )


def _with_interval(rate: str, figures: TextFigures) -> str:
    return f"{percent(figures.counts[rate].rate)} ({figures.intervals[rate].format_ends()})"

"""An evaluation: its splits one after the other, the metrics of each, and what is reported."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
from speechbrain import Stage

from sbkit.base.messages import plural
from sbkit.base.versions import __version__
from sbkit.checkpoint.checkpointer import RANKED_BY
from sbkit.checkpoint.provenance import describe_provenance, provenance_of_run
from sbkit.data.report import encode_clips
from sbkit.data.splits import take_columns
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.report import LONGEST, REPORT, Known, write_report
from sbkit.evaluate.run_results import SUMMARY, read_results, write_summary
from sbkit.evaluate.slices import measure_slices, write_slices
from sbkit.logs.curves import draw_curves
from sbkit.logs.metric import LOSS, best_key
from sbkit.logs.run_log import LOG_FILE, FinalFigures, RunLog
from sbkit.models.loss import Loss
from sbkit.train.moving_average import agree_on_buffers
from sbkit.train.nonfinite import explained_memory
from sbkit.train.schedule import Validation, length_of
from sbkit.train.scoring import BEST_EPOCH, first_best_epoch, metrics_of
from sbkit.train.step import as_loss

logger = logging.getLogger(__name__)

PHASES = {  # what a batch is for, as it is shown
    "valid": "validating",
    "test": "testing",
    "averaging": "averaging checkpoints",
    "decoding": "encoding the validation sets",
    "measure": "measuring features",
}

Results = dict[str, list[Any]]  # of each split, one for every utterance


@torch.no_grad()
def evaluate_splits(
    brain: Any, loaders: Mapping[str, Any], stage: Stage, *, phase: str
) -> list[Loss]:
    """Return the loss of every batch, and leave the results of each split in the Brain.

    After a signal no more batches are evaluated. ``phase`` is for the watchdog.
    """
    brain._results, brain._columns = ({name: [] for name in loaders} for _ in range(2))
    brain.modules.eval()
    brain.moving_average.apply()
    agree_on_buffers(brain.modules)
    losses: list[Loss] = []
    for brain._split, loader in loaders.items():
        for batch in brain.pinging(loader, phase):
            if brain.signals.received:
                return losses
            brain.step += 1
            with explained_memory(batch, "eval_batch_seconds"):
                losses.append(as_loss(brain.evaluate_batch(batch, stage)))
            if not type(brain).metrics:
                rows = zip(losses[-1].sums.tolist(), losses[-1].counts.tolist(), strict=True)
                brain._results[brain._split].extend(rows)
            if brain.debug and brain.step >= brain.debug_batches:
                break
    return losses


def start_validation(brain: Any) -> None:
    """Begin to read the validation sets once more, in the epoch that was the last."""
    epochs = brain._declared("epoch_counter", None)
    brain.on_stage_start(Stage.VALID, getattr(epochs, "current", None))


def validation_error(brain: Any, loaders: Mapping[str, Any]) -> float:
    """Validate the weights as they are, and return what chooses the best: lower is better."""
    start_validation(brain)
    evaluate_splits(brain, loaders, Stage.VALID, phase="averaging")
    name, metric = next(iter(metrics_of(type(brain)).items()))
    value = measure_splits(brain.measured, gather_results(brain._results))[name]
    return value if metric.lower_is_better else -value


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


def log_validation(brain: Any, results: Results, loss: float, epoch: int) -> None:
    """Log and show the metrics of an epoch, and save it with them; every rank calls it."""
    values, best = measure_splits(brain.measured, results), best_key(metrics_of(type(brain)))
    error = -values[best.name] if best.max_key else values[best.name]
    brain._training_metrics.validations.append(Validation(loss, error))
    figures = {name: value for name, value in values.items() if name not in LOSS}
    brain._training_metrics.log_epoch(
        epoch,
        brain.optimizer_step,
        valid_loss=loss,
        values=figures,
        ending=partial(_seconds_of_ending, brain),
    )
    if brain.checkpointer is None:
        return
    first = first_best_epoch(brain.checkpointer, best, epoch=epoch, value=values[best.name])
    brain.checkpointer.save_and_keep_only(
        meta={**values, "epoch": epoch, BEST_EPOCH: first, RANKED_BY: best._asdict()},
        num_to_keep=int(brain._declared("average_checkpoints", 1)),
        max_keys=[key] if (key := best.max_key) else [],
        min_keys=[key] if (key := best.min_key) else [],
    )


def _seconds_of_ending(brain: Any, validation: float) -> float:
    """Estimate what follows the last epoch of a run, by the seconds that a validation takes."""
    if brain.loaders is None:  # what is called after `fit` is not known
        return 0.0
    valid, test = (
        sum(length_of(each) or 0 for each in loaders.values())
        for loaders in (brain.loaders.valid, brain.loaders.test)
    )
    averaged = int(brain._declared("average_checkpoints", 1))
    means = averaged.bit_length() if averaged > 1 else 0  # that are validated
    share = test / max(valid, 1)  # of a validation that the test takes
    return validation * (means + share) + float(brain.seconds_of_ending(share))


def report_test(brain: Any, results: Results) -> None:
    """Write the reports of the test sets, the summary and the curves; print the scores."""
    columns, folder = gather_results(brain._columns), brain._run_folder
    if rank() > 0 or folder is None:
        return
    values = {name: brain.measured(each) for name, each in results.items()}
    entries = {
        name: {**values[name], **(brain.report(name, each, folder) or {})}
        for name, each in results.items()
    }
    _log_test(brain, folder, values, {name: each.get("decoder") for name, each in entries.items()})
    if report_by := getattr(brain.hparams, "report_by", []):
        for name, each in results.items():
            slices = measure_slices(report_by, columns[name], each, brain.measure_slice)
            write_slices(folder / f"report_by_{name}.tsv", slices)
            entries[name]["report_by"] = slices
    notes = [f"{name}: {note}" for name in entries for note in entries[name].get("notes", [])]
    weights = f"mean of {brain.averaged} checkpoints" if brain.averaged > 1 else "best checkpoint"
    parameters = sum(each.numel() for each in brain.modules.parameters())
    size, record = f"{parameters / 1e6:.1f} M parameters", provenance_of_run(folder)
    read, splits = read_results(folder, entries), brain.loaders and brain.loaders.splits
    write_report(
        folder / REPORT,
        [read],
        clips=partial(clips_of, splits.test if splits else {}, brain._declared("sample_rate", 0)),
        metrics=metrics_of(type(brain)),
        known=_known_words(splits.train) if splits and read.utterances else None,
        pictures=[file for name in entries for file in sorted(folder.glob(f"*_{name}.png"))],
        notes=[*notes, f"{size}, {weights}, sbkit {__version__}", describe_provenance(record)],
    )
    write_summary(
        folder / SUMMARY,
        test=entries,
        parameters=parameters,
        train_seconds=brain._training_metrics.train_seconds,
        audio_seconds=brain._training_metrics.audio_seconds,
        device=brain.device,
        provenance=record,
    )
    draw_curves(folder / LOG_FILE, folder / "curves.png", metrics_of(type(brain)))
    rows = ("utterance",) if type(brain).metrics else ("loss", "losses")
    for name, each in results.items():
        logger.info(f"{name}: {brain.described(each)}, {plural(len(each), *rows)}, {weights}")
    for note in notes:
        logger.info(note)


def _log_test(
    brain: Any,
    folder: Path,
    values: Mapping[str, Mapping[str, float]],
    decoders: Mapping[str, str | None],
) -> None:
    run_log, step = RunLog(folder, resume_step=brain.optimizer_step), brain.optimizer_step
    epoch = brain.hparams.epoch_counter.limit
    for name, metrics in values.items():
        figures = FinalFigures(
            epoch=epoch, step=step, split=name, metrics=metrics, decoder=decoders[name]
        )
        run_log.write(figures)
    run_log.close()


def clips_of(
    splits: Mapping[str, datasets.Dataset], sample_rate: int, name: str, ids: list[str], most: int
) -> dict[str, str]:
    """Return the clips of a test set in base64, by id, in at most so many bytes."""
    if name not in splits:
        return {}
    limits = {"max_seconds": LONGEST, "max_characters": most}
    return encode_clips(splits[name], ids, sample_rate=sample_rate, **limits)


def _known_words(train: datasets.Dataset) -> Known:
    texts = take_columns(train, "text")["text"].combine_chunks()
    words = pc.unique(pc.list_flatten(pc.utf8_split_whitespace(texts)))
    return Known(words=frozenset(words.to_pylist()), source="the words of the training transcripts")

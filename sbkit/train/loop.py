"""The training loop, from top to bottom.

    fit -> train_epoch -> fit_batch -> divide_and_step -> step_or_skip
                       -> save_within_epoch
                       -> validate -> evaluate_splits -> evaluate_batch
                                   -> end_validation, which saves

docs/examples/nano.py has the same loop without several processes, precisions, checkpoints and hooks
of a recipe, and a test compares their losses. A function takes the Brain whose hooks it calls. Most
hooks lead back here: `brain.fit_batch` to `fit_batch`, `optimizers_step` to `step_or_skip`,
`_fit_valid` to `validate`, `evaluate_batch` to `evaluate_batch`, `on_stage_end` of a validation to
`end_validation`, and `brain.stopping`, which knows when it is time, to `save_within_epoch`.

Losses are sums and counts, so that micro-batches and ranks add up to the gradient of the mean over
the global batch. The host does not wait for the device: whether a step was skipped is read now and
then.

Legend: a step has `grad_accumulation_factor` micro-batches on each rank, the last one of an epoch
perhaps fewer. `brain.step`, SpeechBrain's name, counts micro-batches of the epoch, and batches in
an evaluation; `brain.optimizer_step` counts steps of the run. `state` is the `TrainingStep`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import speechbrain as sb
import torch
from speechbrain import Stage
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import ConfigError, StopRequestedError
from sbkit.base.torch_internals import multiply_gradients
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.ranking import RANKED_BY
from sbkit.checkpoint.rng import (
    RandomState,
    isolated_rng,
    restore_random_state,
    seed_torch,
)
from sbkit.data.batch import Batch, length_of
from sbkit.data.sampler import RankSampler
from sbkit.distributed.ranks import (
    gather_over_ranks,
    raise_on_all_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from sbkit.logs.metric import LOSS_METRIC, best_key
from sbkit.logs.progress import TrainingProgress
from sbkit.models.loss import Loss
from sbkit.train.evaluation import mean_over_ranks
from sbkit.train.metrics import Meter
from sbkit.train.model_state import agree_on_buffers
from sbkit.train.nonfinite import ids_of, memory_errors
from sbkit.train.ownership import all_within, device_errors, prepare_helpers
from sbkit.train.schedule import Position, set_rate
from sbkit.train.step import (
    Objective,
    as_loss,
    as_losses,
    clip_gradients,
    detached,
    gradients_of,
    match_losses,
    step_unless,
)
from sbkit.train.stopping import FIT_SECONDS, STALE_VALIDATIONS
from sbkit.train.watchdog import watching

logger = logging.getLogger(__name__)

Batches = Iterable[Any]  # a loader
SplitLoaders = Mapping[str, Batches]  # by the name of the split


class ResumedPosition(NamedTuple):
    """The position in a checkpoint, until the resumed epoch continues."""

    random: RandomState | None = None  # the state of the generators
    accumulation: int | None = None  # micro-batches of a step
    is_trained: bool = False  # whether the epoch had its last micro-batch


# ---- a run
def fit(
    brain: sb.Brain,
    epochs: Iterable[int],
    train_set: Batches,
    valid_sets: SplitLoaders | None,
    *,
    show_progress: bool,
) -> None:
    """Train and validate epoch after epoch, from the last checkpoint on.

    Raises StopRequestedError after a signal, once the step is finished and saved.
    """
    # A run, whose Brain `make_brain` gave its loaders, seeds the global generators at each
    # micro-batch that a RankSampler plans. A SpeechBrain recipe draws from them as they are.
    is_run = brain.loaders is not None
    if is_run and epochs is not brain.hparams.epoch_counter:
        raise ConfigError("`epoch_counter` must be `brain.hparams.epoch_counter`; set its `limit`.")
    checkpointer = brain.checkpointer
    try:
        with (
            isolated_rng(brain.device) if is_run else nullcontext(),
            watching(brain),
            checkpointer.claimed() if isinstance(checkpointer, Checkpointer) else nullcontext(),
        ):
            brain.on_fit_start()  # nothing is trained yet, so a signal ends it at once
            if brain.step == 0:
                restore_random_state(brain.resumed.random, brain.device)
            brain.stopping.time_limit.start()
            open_metrics(brain, epochs, train_set)
            for _, part in all_within(brain):
                if isinstance(part, nn.Parameter):
                    part.grad = None  # gradients from before must not count
            brain.owners.begin()
            with brain.stopping.signals, register_optimizer_step_pre_hook(brain.owners.check):
                train_epochs(brain, epochs, train_set, valid_sets, show_progress)
                brain.training_step.moving_average.swap_in()
                stop_if_signaled(brain, in_training=True)  # a signal in the last validation
    finally:
        brain.stopping.time_limit.stop()
        brain.step = 0  # without a checkpoint, the next `fit` starts an epoch
        brain.training_metrics.close()
        brain.training_step.ddp.unwrap()


def open_metrics(brain: sb.Brain, epochs: Iterable[int], train_set: Batches) -> None:
    """Open the log of a fit, and say where it resumes."""
    num_epochs = getattr(epochs, "limit", None) or length_of(epochs) or 0
    next_epoch = getattr(epochs, "current", 0) + 1
    sampler = getattr(train_set, "batch_sampler", None)
    if isinstance(sampler, RankSampler):  # its plan of this epoch is needed anyway
        sampler.set_epoch(next_epoch)
    num_steps = num_epochs * -(-(length_of(train_set) or 0) // brain.grad_accumulation_factor)
    if brain.optimizer_step and (brain.step or next_epoch <= num_epochs):
        logger.info(f"Resuming after step {brain.optimizer_step}, in epoch {next_epoch}.")
    if brain.stopping.time_limit.max_seconds:
        logger.info("note: the clock ends this run (`max_minutes`), so no other is its equal.")
    brain.training_metrics.open(
        brain.run_folder,
        TrainingProgress(
            total_epochs=num_epochs,
            total_steps=num_steps,
            metrics=type(brain).metrics,
            clock_share=brain.stopping.time_limit.measure,
        ),
        step=brain.optimizer_step,
        sources=[] if brain.loaders is None else [*brain.loaders.splits.mix],
    )


def train_epochs(
    brain: sb.Brain,
    epochs: Iterable[int],
    train_set: Batches,
    valid_sets: SplitLoaders | None,
    show_progress: bool,
) -> None:
    """Train and validate each epoch, until the last one or another end of the run."""
    stopping = brain.stopping
    stopping.time_limit.agree()
    trained_epoch: int | None = None
    for epoch in epochs:
        if stops_early(brain) or (brain.step == 0 and stopping.is_over(brain.optimizer_step)):
            break
        train_epoch(brain, train_set, epoch, show_progress)
        trained_epoch = epoch
        if stops_early(brain):
            break
        if valid_sets is not None:
            stopping.save()  # a run that dies in the validation resumes at the epoch's end
            brain.step = 0
            brain._fit_valid(valid_sets, epoch, show_progress)
        brain.step = 0
        ends_debugging = brain.debug and 0 < brain.debug_epochs <= epoch
        if stopping.is_over(brain.optimizer_step) or ends_debugging:
            break
    if stops_early(brain):
        stale = brain.evaluator.stale
        logger.info(f"`early_stopping`: {stale} validations were no better; training ends.")
    if valid_sets is None or trained_epoch is None or brain.evaluator.is_current:
        return
    validate(brain, valid_sets, trained_epoch)  # a recipe left it out


def stops_early(brain: sb.Brain) -> bool:
    """Return whether a validation has just shown that the last `early_stopping` were no better."""
    patience: int = brain.settings["early_stopping"]
    is_validated: bool = brain.evaluator.validated_step == brain.optimizer_step
    return is_validated and 0 < patience <= int(brain.evaluator.stale)


# ---- an epoch
def train_epoch(brain: sb.Brain, train_set: Batches, epoch: int, show_progress: bool) -> None:
    """Train on the micro-batches that are left in an epoch; the last step may have fewer."""
    brain.evaluator.is_current = False
    brain.on_stage_start(Stage.TRAIN, epoch)
    start_epoch(brain, train_set, epoch)
    is_planned = isinstance(getattr(train_set, "batch_sampler", None), RankSampler)
    validate_if_due(brain, epoch)  # if the run died in that validation
    for batch, is_last in training_batches(brain, train_set):
        if stops_early(brain) or brain.stopping.is_over(brain.optimizer_step):
            break
        brain.epoch_share = share_of_epoch(brain, length_of(train_set))
        brain.watchdog.ping("step", brain.optimizer_step, ids_of(batch))
        brain.step += 1
        brain.is_last_batch = is_last
        steps_before = brain.optimizer_step
        # Here, because a recipe's own `fit_batch` must follow the schedule, too, and draw the same
        # numbers after a resume.
        set_learning_rate(brain)
        with device_errors(brain), seeded(brain, batch) if is_planned else seeded_draws([]):
            objective = brain.fit_batch(batch)
        seconds = batch.seconds if isinstance(batch, Batch) else 0.0
        sources = batch.sources if isinstance(batch, Batch) else None
        brain.training_metrics.add(as_losses(objective), seconds, sources)
        if brain.optimizer_step > steps_before:
            brain.training_step.freeze(brain.optimizer_step)
            if brain.optimizer_step % brain.settings["log_every"] == 0:
                log_step(brain, epoch, live=show_progress)
        if brain.debug and brain.step >= brain.debug_batches:
            break
        brain.stopping.after_micro_batch(
            brain.optimizer_step, ends_step=brain.should_step, is_last=is_last
        )
        validate_if_due(brain, epoch)
        brain.watchdog.ping("data", brain.optimizer_step)
    read_metrics(brain)
    brain.zero_grad(set_to_none=True)
    brain.on_stage_end(Stage.TRAIN, brain.training_metrics.of_epoch.loss, epoch)
    brain.avg_train_loss = 0.0


def start_epoch(brain: sb.Brain, train_set: Batches, epoch: int) -> None:
    """Put the model into training mode, and the sampler at the position in the epoch."""
    brain.training_step.start_epoch(epoch)
    prepare_helpers(brain)
    brain.training_metrics.start_epoch(afresh=brain.step == 0)
    if brain.step == 0:
        brain.nonfinite_count = 0
    brain.training_step.freeze(brain.optimizer_step)
    brain.zero_grad(set_to_none=True)
    sampler = getattr(train_set, "batch_sampler", None)
    if isinstance(sampler, RankSampler):
        if brain.resumed.accumulation is not None:  # the same steps, in other micro-batches
            steps = brain.step // brain.resumed.accumulation
            brain.step = steps * brain.grad_accumulation_factor
        sampler.set_epoch(epoch, start=brain.step)
    elif hasattr(brain.train_sampler, "set_epoch"):
        brain.train_sampler.set_epoch(epoch)
    if world_size() > 1 and not brain.has_own_step and not brain.training_step.ddp.is_shared:
        brain.training_step.ddp.share()


def training_batches(brain: sb.Brain, train_set: Batches) -> Iterator[tuple[Any, bool]]:
    """Return the batches left in an epoch, and whether each is the last; measure the waits."""
    batches = iter(train_set)
    if brain.resumed.is_trained:  # a loader that saves no position would start again
        next(batches, None)
        batches = iter(())
    if brain.step > 0:  # the loader draws when its iterator is made, before the saved state
        restore_random_state(brain.resumed.random, brain.device)
    brain.resumed = ResumedPosition()
    marked = mark_last(batches, count=length_of(train_set), done=brain.step)
    meter: Meter = brain.training_metrics.meter
    return meter.timed(marked)


def mark_last(batches: Batches, *, count: int | None, done: int) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last of its epoch; ``done`` batches came before.

    If their ``count`` is not known, one batch is read ahead. Otherwise none is: a loader that saves
    its position would be one batch too far.
    """
    if count is not None:
        yield from ((batch, index == count) for index, batch in enumerate(batches, done + 1))
        return
    for batch, following in pairwise(chain(batches, [None])):
        yield batch, following is None


def share_of_epoch(brain: sb.Brain, num_batches: int | None) -> float:
    """Return the share before the next step, in steps: a schedule ignores the accumulation."""
    factor = brain.grad_accumulation_factor
    return brain.step // factor / -(-num_batches // factor) if num_batches else 0.0


def set_learning_rate(brain: sb.Brain) -> None:
    """Set the rate of the next step, if there is an `lr_schedule`."""
    if brain.schedule is None:
        return
    epoch, step = brain.hparams.epoch_counter.current, brain.optimizer_step + 1
    factor = brain.schedule(Position(brain.run_share, step, epoch, brain.evaluator.validations))
    set_rate(active_optimizers(brain).values(), factor)


def seeded(brain: sb.Brain, batch: object) -> AbstractContextManager[None]:
    """Seed random numbers from the position in the run, so that a resumed run draws the same.

    `draw_uniform` is seeded by utterance, and torch by rank.
    """
    seed, epoch = brain.hparams.seed, brain.hparams.epoch_counter.current
    seed_torch(seed, epoch=epoch, micro_batch=brain.step)
    step = (brain.step - 1) // brain.grad_accumulation_factor
    return seeded_draws(ids_of(batch), seed=seed, epoch=epoch, step=step)


def log_step(brain: sb.Brain, epoch: int, *, live: bool) -> None:
    """Log the figures since the last logged step; ``live`` also shows them."""
    read_metrics(brain)
    rates = [o.param_groups[0]["lr"] for o in active_optimizers(brain).values()]
    brain.training_metrics.log_step(
        epoch, brain.optimizer_step, rate=next(iter(rates), 0.0), live=live
    )


def read_metrics(brain: sb.Brain) -> None:
    """Read the sums of the last steps from the device, over all ranks."""
    read_skipped(brain)
    brain.training_metrics.read()
    brain.avg_train_loss = brain.training_metrics.of_epoch.loss


# ---- a micro-batch
def fit_batch(brain: sb.Brain, batch: Any) -> Objective:
    """Add one micro-batch's gradient, and step when the global batch is complete.

    A recipe's own, in its place, shares its gradients among the ranks itself, calls
    `brain.optimizers_step` with the gradient of a mean when `brain.should_step`, and returns its
    loss. Returns the result of `compute_objectives`, without its graph.
    """
    state = brain.training_step
    batch = brain.to_device(batch)
    if (brain.step - 1) % brain.grad_accumulation_factor == 0:  # the first of its step
        state.buffers.save()  # the running statistics, in case the step is skipped
    brain.on_fit_batch_start(batch, brain.should_step)
    with brain.no_sync(not brain.should_step), memory_errors(batch):
        with brain.training_ctx:
            outputs, objective = state.ddp(batch)  # the recipe's forward and loss
        add_gradient(brain, batch, objective)
    if brain.should_step:
        brain.owners.check()
        divide_and_step(brain)
    brain.on_fit_batch_end(batch, outputs, objective, brain.should_step)
    return detached(objective)


def add_gradient(brain: sb.Brain, batch: object, objective: Objective) -> None:
    """Add the gradients of a micro-batch; each loss moves the parameters of its optimizer."""
    state = brain.training_step
    optimizers: Mapping[str, Optimizer] = brain.optimizers_dict or {}
    losses = match_losses(objective, optimizers)
    totals = [loss.sums.sum() for loss in losses.values()]
    for position, (name, total) in enumerate(zip(losses, totals, strict=True), 1):
        parameters = None
        if isinstance(objective, Mapping):
            groups = optimizers[name].param_groups
            parameters = [p for group in groups for p in group["params"] if p.requires_grad]
            if not parameters:  # all frozen for a time
                continue
        torch.autograd.backward(
            brain.scaler.scale(total), inputs=parameters, retain_graph=position < len(totals)
        )
    # The labels of each loss, and 1 if it is not finite: (losses, 2)
    labels = torch.stack([loss.counts.sum() for loss in losses.values()])
    counts = torch.stack([labels, ~torch.stack(totals).isfinite()], 1).to(torch.float32)
    state.loss_names = [*losses]
    state.counts = counts if state.counts is None else state.counts + counts
    state.nonfinite.record(batch, torch.stack(totals).sum())


# ---- a step
def divide_and_step(brain: sb.Brain) -> None:
    """Turn the gradients of sums into those of means over all labels, and take a step.

    The factors include the world size, because DDP has averaged gradients that are to be summed. If
    the loss of any rank is not finite, they are NaN, so that all ranks skip the step together.
    """
    state = brain.training_step
    state.ddp.check_all_used()
    labels, num_bad = sum_over_ranks(state.counts).unbind(1)  # (losses,), of all micro-batches
    state.counts, state.num_bad = None, num_bad.sum()
    factors = torch.where(state.num_bad > 0, torch.nan, world_size() / labels.clamp(min=1))
    for name, optimizer in active_optimizers(brain).items():
        factor = factors[state.loss_names.index(name) if len(factors) > 1 else 0]
        if gradients := gradients_of(optimizer):
            multiply_gradients(gradients, factor.to(gradients[0].device))
    brain.optimizers_step()  # -> step_or_skip
    brain.modules.zero_grad(set_to_none=True)  # else gradients of a frozen optimizer add up


def step_or_skip(brain: sb.Brain) -> None:
    """Clip and step every optimizer, or none if a loss or a gradient is not finite.

    A skipped step counts, but weights, optimizers, running statistics and averages stay the same.
    """
    optimizers = active_optimizers(brain)
    if not optimizers:
        return
    state, scaler = brain.training_step, brain.scaler
    # Optimizers without a gradient are left out: a GradScaler refuses them, and torch returns the
    # norm of no gradient on the CPU, whatever the device.
    stepping = {name: o for name, o in optimizers.items() if gradients_of(o)}
    for optimizer in stepping.values():
        scaler.unscale_(optimizer)
    norms = {name: clip_gradients(o, brain.max_grad_norm) for name, o in stepping.items()}
    has_bad_loss = state.num_bad > 0  # (), on the device, as all flags here
    zero = torch.zeros_like(state.num_bad)  # if there are no norms
    skipped = has_bad_loss | ~torch.stack([zero, *norms.values()]).isfinite().all()
    for optimizer in stepping.values():
        step_unless(skipped, optimizer, scaler)
    state.buffers.restore(skipped)
    scaler.update()
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    brain.evaluator.is_current = False
    brain.optimizer_step += 1
    state.moving_average.update(brain.optimizer_step, skipped)
    state.nonfinite.end_step(brain.optimizer_step, torch.stack([state.num_bad, skipped]))
    are_several = len(brain.optimizers_dict or ()) > 1
    brain.training_metrics.log_gradients(norms, scaler, by_optimizer=are_several)
    if brain.device_type == "cpu":  # the host need not wait, and can stop at the bad step
        read_skipped(brain)


def active_optimizers(brain: sb.Brain) -> dict[str, Optimizer]:
    """Return the optimizers that step, by name."""
    if brain.optimizers_dict is not None:
        return dict(brain.freeze_optimizers(brain.optimizers_dict))
    return {} if brain.opt_class is None else {"opt_class": brain.optimizer}


def read_skipped(brain: sb.Brain) -> None:
    """Read which of the last steps were skipped; raise SbkitError if they are too many."""
    recorder = brain.training_step.nonfinite
    skipped, num_bad = recorder.flush(overflow_is_usual=brain.scaler.is_enabled())
    brain.nonfinite_count += num_bad
    recorder.check_count(brain.nonfinite_count, brain.nonfinite_patience)
    brain.training_metrics.meter.skipped_steps += skipped


# ---- a validation
def validate_if_due(brain: sb.Brain, epoch: int) -> None:
    """Validate within an epoch, and save before and after; training then goes on unchanged.

    A run that dies while it validates resumes before the validation.
    """
    is_within_epoch = brain.step > 0 and not (brain.is_last_batch or brain.resumed.is_trained)
    is_due = brain.should_step and brain.evaluator.is_due(brain.optimizer_step)
    if not (is_within_epoch and is_due) or brain.stopping.is_over(brain.optimizer_step):
        return
    read_metrics(brain)
    brain.stopping.save()
    with isolated_rng(brain.device):
        validate(brain, brain.evaluator.loaders, epoch, micro_batch=brain.step)
    brain.training_step.train_mode()
    brain.training_metrics.start_epoch(afresh=False)


def validate(brain: sb.Brain, loaders: SplitLoaders, epoch: int, *, micro_batch: int = 0) -> None:
    """Validate after an epoch, or within one after ``micro_batch``; `on_stage_end` saves."""
    brain.on_stage_start(Stage.VALID, epoch)
    losses = evaluate_splits(brain, loaders, Stage.VALID, phase="valid")
    stop_if_signaled(brain, in_training=True)
    mean_loss = mean_over_ranks(losses)
    brain.evaluator.is_current = True
    brain.evaluator.validated_step = brain.optimizer_step
    if isinstance(brain.checkpointer, Checkpointer):
        brain.checkpointer.is_within_epoch = micro_batch > 0
    brain.step = micro_batch
    brain.on_stage_end(Stage.VALID, mean_loss, epoch)
    brain.step = micro_batch


def test(brain: sb.Brain, loaders: SplitLoaders) -> float:
    """Evaluate the loaded weights, and return the mean loss."""
    brain.on_stage_start(Stage.TEST, None)
    losses = evaluate_splits(brain, loaders, Stage.TEST, phase="test")
    stop_if_signaled(brain)
    mean_loss = mean_over_ranks(losses)
    brain.step = len(losses)  # as in SpeechBrain
    brain.on_stage_end(Stage.TEST, mean_loss, None)
    brain.step = 0
    return mean_loss


@torch.no_grad()
def evaluate_splits(
    brain: sb.Brain, loaders: SplitLoaders, stage: Stage, *, phase: str
) -> list[Loss]:
    """Return the loss of every batch, and leave the results of each split in the evaluator.

    A signal ends it early. ``phase`` names it for the watchdog and the progress bar.
    """
    brain.evaluator.start(loaders)
    brain.training_metrics.meter.reset()
    brain.modules.eval()
    prepare_helpers(brain)
    brain.training_step.moving_average.swap_in()
    agree_on_buffers(brain.modules)
    losses: list[Loss] = []
    batches = (
        (split, batch)
        for split, loader in loaders.items()
        for batch in islice(brain.watched(loader, phase), brain.max_evaluated_batches)
    )
    for split, batch in batches:
        if brain.stopping.signals.received:
            break
        brain.evaluator.enter(split)
        brain.step += 1
        with memory_errors(batch, "eval_batch_seconds"), device_errors(brain):
            loss = as_loss(brain.evaluate_batch(batch, stage))
        brain.training_metrics.log_parts(loss)
        losses.append(loss)
        if not type(brain).metrics:
            pairs = zip(loss.sums.tolist(), loss.counts.tolist(), strict=True)
            brain.evaluator.add(pairs)
    brain.step = 0
    return losses


@torch.no_grad()
def evaluate_batch(brain: sb.Brain, batch: Any, stage: Stage) -> Any:
    """Return the result of `compute_objectives` for a batch, a Loss or a mean, on the CPU."""
    batch = brain.to_device(batch)
    with seeded_draws(ids_of(batch)), brain.evaluation_ctx:
        outputs = brain.compute_forward(batch, stage=stage)
        objective = brain.compute_objectives(outputs, batch, stage=stage)
    if type(brain).metrics:
        brain.evaluator.add(brain.score(outputs, batch))
    return (as_loss(objective) if isinstance(objective, Mapping) else objective).detach().cpu()


def end_validation(brain: sb.Brain, loss: float, epoch: int) -> None:
    """Log a validation, save, and tell the user."""
    values = brain.evaluator.end_validation(epoch)  # before the save, which has its result
    best = best_key(brain.evaluator.metrics)
    figures = brain.training_metrics.log_epoch(
        epoch,
        brain.optimizer_step,
        valid_loss=loss,
        values={name: value for name, value in values.items() if name not in LOSS_METRIC},
    )
    # Before the save: a run that this share ends is over by the seconds in its checkpoint, too.
    brain.stopping.time_limit.agree()
    if brain.checkpointer is not None:
        position = {"epoch": epoch, "optimizer_step": brain.optimizer_step}
        seconds = {FIT_SECONDS: brain.stopping.time_limit.seconds}
        ranking = {STALE_VALIDATIONS: brain.evaluator.stale, RANKED_BY: best._asdict()}
        brain.checkpointer.save_and_keep_only(
            meta={**values, **position, **seconds, **ranking},
            num_to_keep=int(brain.settings["average_checkpoints"]),
            max_keys=[best.max_key] if best.max_key else [],
            min_keys=[best.min_key] if best.min_key else [],
        )
    # After the save, which must not wait for a screen
    brain.training_metrics.progress.report_epoch(figures)
    if brain.on_epoch is not None:
        with raise_on_all_ranks(Exception):  # the user's code may raise any
            if rank() == 0:
                brain.on_epoch(figures.as_record())


# ---- saving and stopping
def save_within_epoch(brain: sb.Brain) -> None:
    """Save the position; the checkpoint replaces the last one that was saved within an epoch."""
    brain.watchdog.ping("checkpoint", brain.optimizer_step)
    agree_on_buffers(brain.modules)  # only one rank's are saved
    read_metrics(brain)
    with brain.training_step.moving_average.swapped_in():
        brain.checkpointer.save_and_keep_only(
            meta={INTRA_EPOCH_CKPT_FLAG: True},
            end_of_epoch=False,
            num_to_keep=1,
            ckpt_predicate=lambda checkpoint: INTRA_EPOCH_CKPT_FLAG in checkpoint.meta,
        )


def stop_if_signaled(brain: sb.Brain, *, in_training: bool = False) -> None:
    """Raise StopRequestedError if any rank has received a signal; all ranks call this."""
    if not any(gather_over_ranks(brain.stopping.signals.received is not None)):
        return
    if in_training:
        brain.stopping.leave(brain.optimizer_step)  # raises it, and says what is saved
    else:
        raise StopRequestedError(
            "Stopped outside of training; the same command or call does the rest."
        )

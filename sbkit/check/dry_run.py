"""A dry run: small steps of training and a validation on two short utterances, on the CPU.

    two steps at the highest rate -> more, while a gradient is missing or zero -> the first weights
    again -> a validation -> a second Brain with the state that a checkpoint would hold

It shows whether the parts fit each other, what learns, whether a checkpoint holds all that training
changes, and what an output depends on.

Legend: U frames, D width.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import SbkitError, concerning
from sbkit.base.messages import listed, short_value
from sbkit.check.checked_run import CPU_OPTIONS, CheckedRun, DryRun, Finding
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.document import Keys, dotted
from sbkit.data.batch import Batch, Loader, Loaders
from sbkit.data.shard import Row
from sbkit.logs.progress import TrainingProgress
from sbkit.logs.run_log import EpochFigures
from sbkit.models.encoder import Predictions
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain, training_loss
from sbkit.train.evaluation import mean_over_ranks
from sbkit.train.nonfinite import ids_of
from sbkit.train.optimizers import FREEZE, named_parameters, parameters_at
from sbkit.train.schedule import set_rate
from sbkit.train.setup import PreparedRun, build_again, make_brain
from sbkit.train.step import as_loss

MAX_ROWS = 32  # read to find a short utterance, and one that is LENGTH_RATIO times as long
LENGTH_RATIO = 4.0  # a layer that starts in the padding must start far from the end
# Without a gradient before a parameter counts as never trained. At `layerdrop: 0.8`, 30 steps skip
# one of 24 layers each time in 3 % of the runs, 5 steps in all.
MAX_STEPS = 30
# Relative to the largest state. In hparams/ctc.yaml states differ by 6e-7; in ctc_speechbrain.yaml,
# whose convolutions see a frame of padding, they differ by 0.2, and the losses by only 0.003.
MAX_STATE_CHANGE = 1e-3
UNUSED_FIX = (
    "Use it in the recipe, `freeze` it, or take it out of the YAML; for a decoder, set "
    "`num_decoder_layers: 0`."
)
ZERO_FIX = "Look for round(), sign(), clamp() or a factor of 0 between it and the loss."


def take_small_steps(
    run_copy: PreparedRun,
    brain: Brain,
    reached: Sequence[tuple[Keys, object]],
    highest_factor: float,
) -> DryRun:
    """Take small steps, and return their results; the weights end as they began.

    reached: every object within the objects and the Brain, before `forward` makes parts.
    highest_factor: of the declared rate, in the run.
    """
    run = DryRun()
    paths = {id(part): keys for keys, part in reached}
    eager = nullcontext()
    if "torch._dynamo" in sys.modules:  # compiled parts would fail under the hooks
        eager = torch.compiler.set_stance("force_eager")
    with (
        eager,
        register_module_forward_pre_hook(run.enter),
        register_module_forward_hook(run.leave),
    ):
        try:
            batch = small_batch(run_copy)
            _run_epoch(run_copy, brain, batch, run, highest_factor)
        except Exception as error:  # whatever a part or a hook raises
            run.error = error
        brain.modules.zero_grad(set_to_none=True)  # gradients are as large as the model
        if run_copy.placement.device.type != "cpu":  # else `check_cost` steps on
            for optimizer in (brain.optimizers_dict or {}).values():
                optimizer.state.clear()  # often twice as large
        if run.error is None:
            copy = make_brain(build_again(run_copy), **CPU_OPTIONS)
            begin_training(copy, run_copy.loaders, batch)
            _find_unsaved(copy, brain, batch, run, paths)
    return run


def begin_training(brain: Brain, loaders: Loaders, batch: object) -> None:
    """Call the hooks of a run up to its first step; the normalization is measured on one batch."""
    brain.loaders = replace(loaders, for_statistics=cast(Loader, [batch]))
    brain.on_fit_start()
    epoch = next(iter(brain.hparams.epoch_counter), 1)
    brain.on_stage_start(Stage.TRAIN, epoch)
    brain.training_step.start_epoch(epoch)


def take_step(brain: Brain, batch: object) -> Loss:
    """Take a step by `fit_batch`, with the same batch as each of its micro-batches."""
    for micro_batch in range(1, brain.grad_accumulation_factor + 1):
        brain.step = micro_batch
        with seeded_draws([]):
            objective = brain.fit_batch(batch)
    return as_loss(objective)


class _Unreported(TrainingProgress):
    def report_epoch(self, figures: EpochFigures) -> None: ...


def _run_epoch(
    run_copy: PreparedRun, brain: Brain, batch: object, run: DryRun, highest_factor: float
) -> None:
    """Take steps, put the first weights back, and validate; no checkpoint is saved."""
    try:
        begin_training(brain, run_copy.loaders, batch)
    except Exception:
        training_loss(brain, batch)  # its error names a part that does not fit
        raise
    parameters = dict(brain.modules.named_parameters())
    first_weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    loss = _take_steps(brain, batch, run, highest_factor)
    average = brain.training_step.moving_average
    average.restart()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first_weights[name])
    brain.training_metrics.progress = _Unreported(total_epochs=1, total_steps=1)
    checkpointer = brain.checkpointer
    brain.checkpointer = Checkpointer(run_copy.spec.folder / "trial")
    brain.on_stage_end(Stage.TRAIN, mean_over_ranks([loss]), 1)
    brain.on_stage_start(Stage.VALID, 1)
    losses = brain.evaluate_splits({"valid": [batch]}, Stage.VALID, phase="valid")
    brain.on_stage_end(Stage.VALID, mean_over_ranks(losses), 1)
    brain.checkpointer = checkpointer


def _take_steps(brain: Brain, batch: object, run: DryRun, highest_factor: float) -> Loss:
    """Take two steps, since the first may break the second; return the loss of the last.

    They are taken at the highest rate of the schedule. More steps follow while a gradient is zero:
    a head of zeros leaves the parts below it without one in the first step, and a step may skip a
    layer.
    """
    named = named_parameters(brain.modules, brain.hparams.settings)
    trainable = {id(p) for p in named.values() if p.requires_grad}
    optimizers = brain.optimizers_dict or {}
    is_zero: dict[int, bool] = {}  # in all steps; one that is not finite is skipped

    def record(*_: object) -> None:
        for parameter in brain.modules.parameters():
            if (gradient := parameter.grad) is not None:
                is_zero[id(parameter)] = is_zero.get(id(parameter), True) and not gradient.any()

    set_rate(optimizers.values(), highest_factor)
    run.rate, run.rate_of = max(
        (
            (group["lr"], name)
            for name, optimizer in optimizers.items()
            for group in optimizer.param_groups
        ),
        default=(0.0, ""),
    )
    buffers = [(buffer, buffer.clone()) for buffer in brain.modules.buffers()]
    with register_optimizer_step_pre_hook(record):
        first, loss = take_step(brain, batch), take_step(brain, batch)
        run.loss_before, run.num_labels = first.sums.sum(), first.counts.sum()
        with torch.no_grad(), seeded_draws([]):
            run.loss_after = training_loss(brain, batch).sums.sum().cpu()
        if run.explodes:  # the other checks need finite statistics
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        else:
            for _ in range(2, MAX_STEPS):
                if any(is_zero.values()) or not trainable <= is_zero.keys():
                    loss = take_step(brain, batch)
    # Without any, the loss is not finite, as `check_steps` says, or they step later.
    run.trained = {*is_zero} or trainable
    if not run.explodes:
        run.zero = {key for key, value in is_zero.items() if value}
    return loss


def _find_unsaved(
    copy: Brain, brain: Brain, batch: object, run: DryRun, paths: Mapping[int, Keys]
) -> None:
    """Load the model's state into a second model, and find the parts and attributes that it lacks.

    Attributes count only if the second model computes other losses.
    """
    lacking = copy.modules.load_state_dict(brain.modules.state_dict(), strict=False)
    parts, copies = dict(brain.modules.named_modules()), dict(copy.modules.named_modules())

    def path_of(part: str, attribute: str) -> Keys:
        return (*paths.get(id(parts[part]), ("model",)), attribute)

    for part in lacking.unexpected_keys:
        attribute = ""
        while part not in copies:
            part, _, attribute = part.rpartition(".")
        if (path := path_of(part, attribute)) not in run.created:
            run.created.append(path)
    if run.created:
        return
    try:
        is_same = torch.allclose(_losses_of(brain, batch), _losses_of(copy, batch), rtol=1e-4)
    except Exception:  # a part may raise anything without its learned state
        is_same = False
    if not is_same:
        run.unsaved = [
            path_of(name, attribute)
            for name, part in parts.items()
            for attribute in _changed_attributes(part, copies[name])
        ] or [("model",)]


def _changed_attributes(part: nn.Module, copy: nn.Module) -> Iterator[str]:
    """Yield the names of numbers, arrays and tensors that differ between two modules."""
    for name, value in vars(part).items():
        if isinstance(value, Tensor | np.ndarray | int | float):
            tensor, copied = (torch.as_tensor(vars(m).get(name, [])) for m in (part, copy))
            if not np.array_equal(tensor.detach().numpy(), copied.detach().numpy()):
                yield name


@contextmanager
def evaluation(brain: Brain, batch: object) -> Iterator[object]:
    """Yield the predictions of a Brain in an evaluation, with the same random numbers each time."""
    brain.modules.eval()
    brain.on_stage_start(Stage.VALID, 1)
    torch.manual_seed(0)
    with torch.no_grad(), seeded_draws(ids_of(batch)):
        yield brain.compute_forward(batch, Stage.VALID)


def _losses_of(brain: Brain, batch: object) -> Tensor:
    with evaluation(brain, batch) as outputs:
        return as_loss(brain.compute_objectives(outputs, batch, Stage.VALID)).sums


def short_rows(setup: PreparedRun) -> list[Row]:
    """Return two short utterances of the training data; one is longer, to have padding."""
    dataset = example_loader(setup).dataset
    num_rows = min(MAX_ROWS, len(dataset))
    rows = [dataset[index] for index in range(num_rows)]
    shortest, *longer = sorted(rows, key=lambda row: len(row["audio"]))
    min_samples = LENGTH_RATIO * len(shortest["audio"])
    long_enough = [row for row in longer if len(row["audio"]) >= min_samples] or longer[-1:]
    return [shortest, *long_enough[:1]]


def small_batch(setup: PreparedRun) -> object:
    """Collate two short utterances of the training data."""
    return example_loader(setup).collate_fn(short_rows(setup))


def example_loader(setup: PreparedRun) -> Any:
    """Return the training loader; if it has no rows, that of statistics, over the training set."""
    train = setup.loaders.train
    return train if hasattr(train, "dataset") else setup.loaders.for_statistics


# ---- do the parts fit, and are they saved?


def check_shapes(run: CheckedRun) -> Iterator[Finding]:
    """Find the part that fails in a step, for example because its input has another size."""
    dry_run = run.dry_run
    failing = [id(module) for module in dry_run.running[-1:]]
    path = next((keys for keys, part in run.reached if id(part) in failing), ())
    keys = path if path and path[0] in run.spec.document.root else ()
    if isinstance(dry_run.error, SbkitError):
        with concerning(*keys):
            raise dry_run.error
    if dry_run.error is not None:
        name = f"`{dotted(keys)}`" if keys else "the recipe"
        reason = str(dry_run.error).strip().partition("\n")[0]
        yield run.finding(
            *keys,
            problem=f"An epoch of two short utterances fails in {name} "
            f"({type(dry_run.error).__name__}: {reason})",
        )


def check_state(run: CheckedRun) -> Iterator[Finding]:
    """Find state that `forward` makes or changes, and that a checkpoint would not hold."""
    dry_run = run.dry_run
    if paths := dry_run.created or dry_run.unsaved:
        origin, fix = "made by `forward` when it is first called", "Make it in `__init__`."
        if not dry_run.created:
            origin = "changed by training, but neither a parameter nor a buffer"
            fix = "Register it with `register_buffer`, as sbkit.models.layers.GlobalNorm does."
        names = listed(f"`{dotted(keys)}`" for keys in paths)
        yield run.finding(
            *paths[0],
            problem=f"{names} {'is' if len(paths) == 1 else 'are'} {origin}, so in no checkpoint",
            fix=fix,
        )


# ---- does everything learn?


def check_unused(run: CheckedRun) -> Iterator[Finding]:
    """Find parts of the model that small steps leave without a gradient, or with one of zero."""
    dry_run = run.dry_run
    used = dry_run.trained - dry_run.zero
    dead = {id(p) for p in run.model.parameters() if p.requires_grad and id(p) not in used}
    switches = _switches(run) if dead else {}
    groups: dict[tuple[str | int, str, str], list[Keys]] = {}  # by key, reason and fix
    # A module comes before its parts, so the largest modules with only dead parameters are named.
    for keys, part in run.reached:
        inside = {id(p) for p in part.parameters()} if isinstance(part, nn.Module) else {id(part)}
        if inside and inside <= dead:
            dead -= inside
            modules = part.modules() if isinstance(part, nn.Module) else ()
            was_called = not modules or any(id(module) in dry_run.called for module in modules)
            switch = next((name for name, ids in switches.items() if inside & ids), None)
            key, fix = switch or keys[0], UNUSED_FIX
            if switch:
                reason = f"cannot learn with `{switch}: {short_value(run.copy.hparams[switch])}`"
            elif not inside <= dry_run.zero:
                verb = "does not reach the loss" if was_called else "is never run"
                reason = f"{verb}, so never learns"
            elif len(keys) == 1:
                reason = f"has gradients of zero in {MAX_STEPS} steps, so does not learn"
                fix = ZERO_FIX
            else:  # it may begin to learn once the rest of its part does
                continue
            groups.setdefault((key, reason, fix), []).append(keys)
    for (key, reason, fix), paths in groups.items():
        problem = f"{', '.join(f'`{dotted(keys)}`' for keys in paths)} {reason}"
        yield run.finding(key, problem=problem, fix=fix, stops=fix is not ZERO_FIX)
    yield from _frozen_by_code(run)


def _frozen_by_code(run: CheckedRun) -> Iterator[Finding]:
    """Note the parts of the network that the Brain freezes, but not the YAML."""
    objects, brain = dict(run.copy.hparams.items()), run.brain  # marks no key as read
    declared = [parameters_at(path, objects, FREEZE) for path in brain.training_step.freezing.steps]
    frozen_by_key = {id(parameter) for parameters in declared for parameter in parameters}
    for name in (*brain.parts, *brain.optional_parts):
        part = objects.get(name)
        parameters = [*part.parameters()] if isinstance(part, nn.Module) else []
        learnable = [p for p in parameters if id(p) in run.learnable - frozen_by_key]
        if learnable and not any(p.requires_grad for p in learnable):
            yield run.note(
                name,
                problem=f"{type(brain).__name__} freezes `{name}`, so it never learns",
                fix=f"Declare it: `freeze: [{name}]`, or take it out of the YAML and of `model`.",
            )


def _switches(run: CheckedRun) -> dict[str, set[int]]:
    """Return the keys of 0, 1 or a boolean, and the ids of all that only another value trains."""
    brain, batch = run.brain, small_batch(run.copy)
    trained_in_any_case = _trained_in_a_step(brain, batch)
    switches: dict[str, set[int]] = {}
    for key, value in run.copy.hparams.items():
        if isinstance(value, int | float) and value in (0, 1):
            setattr(brain.hparams, key, not value if isinstance(value, bool) else 0.5)
            switches[key] = _trained_in_a_step(brain, batch) - trained_in_any_case
            delattr(brain.hparams, key)
    return switches


def _trained_in_a_step(brain: Brain, batch: object) -> set[int]:
    """Return the ids of parameters with a gradient, with the same random numbers each time."""
    torch.manual_seed(0)
    with suppress(Exception), seeded_draws(ids_of(batch)):  # a part may raise for a switched key
        torch.autograd.backward(training_loss(brain, batch).sums.sum())
    trained = (p for p in brain.modules.parameters() if p.grad is not None and p.grad.any())
    ids = set(map(id, trained))
    brain.modules.zero_grad(set_to_none=True)
    return ids


def check_steps(run: CheckedRun) -> Iterator[Finding]:
    """Find a rate at which two steps multiply the loss of their own batch."""
    dry_run = run.dry_run
    if dry_run.created or run.brain.optimizers_dict is None or not dry_run.explodes:
        return
    path = run.rate_path(dry_run.rate_of)
    yield run.finding(
        *path,
        problem=f"Two steps at a learning rate of {dry_run.rate:g} raise the loss of their own "
        f"batch from {dry_run.loss_before:.3g} to {dry_run.loss_after:.3g}",
        fix=f"Lower `{dotted(path)}`.",
    )


# ---- what does an output depend on?


def check_padding(run: CheckedRun) -> Iterator[Finding]:
    """Find states of an utterance that change in a batch with a longer one."""
    brain = run.brain
    rows = short_rows(run.copy)
    collate = example_loader(run.copy).collate_fn
    if not isinstance(collate(rows), Batch):
        return
    with preserve_rng(brain.device):
        batched = _states_of(brain, collate(rows))
        single = [states for row in rows for states in _states_of(brain, collate([row]))]
    if len(batched) != len(single):
        return  # a mean of the batch
    change = max(map(_relative_change, batched, single))
    if change > MAX_STATE_CHANGE:
        yield run.note(
            "model",
            problem=f"The output for an utterance changes by {change:.1%} beside a longer one",
            fix="Let parts take lengths; leave padding out of means, norms and attention, and "
            "start the backward direction of recurrent layers at the end of each utterance.",
        )


def _states_of(brain: Brain, batch: Batch) -> list[Tensor]:
    """Return the encoder's states of each utterance (U, D), or its loss if there are none."""
    with evaluation(brain, batch) as outputs:
        if isinstance(outputs, Predictions):
            rows = zip(outputs.states, outputs.frame_lengths.tolist(), strict=True)
            return [states[:frames] for states, frames in rows]
    return [*_losses_of(brain, batch)]


def _relative_change(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference of two tensors, as a share of the largest value."""
    if value.shape != reference.shape or not reference.numel():
        return math.inf if value.numel() else 0.0
    return float((value - reference).abs().max() / reference.abs().max().clamp(min=1e-3))

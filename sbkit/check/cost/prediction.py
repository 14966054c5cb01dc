"""What a run will take: memory, time and room, from the plan of its batches and a few small steps.

The figures are predictions, not faults; only too little room on the disk, or in memory, is one.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing, to_json, write_text_atomically
from sbkit.base.machine import available_memory
from sbkit.check.cost.probe import (
    measure_evaluation_memory,
    measure_step_memory,
    size_of,
    time_evaluation,
    time_steps,
)
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run
from sbkit.check.model.placement import count_processes
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.checkpoint.declaration import CHECKPOINTS
from sbkit.data.batches.plan import MicroBatch
from sbkit.data.batches.sampler import TrainSampler, split_batch
from sbkit.distributed.device import resolve
from sbkit.train.buffers import unchanged
from sbkit.train.cost import PREDICTION
from sbkit.train.memory import bytes_of

NAME = "prediction"
OF_OPTIMIZER = 1 << 18  # elements of each parameter that the optimizer is tried on, at most
BESIDE_KEPT = 2  # checkpoints: the newest, and the one being written


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one process of a run will take.

    peak_bytes: model, optimizer, and the larger of activations and gradients, which make room for
    each other, or both where gradients are accumulated; or a batch of validation, if that is more.
    Seconds are of this machine; None when another one is meant.
    """

    parameters: int
    model_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    validation_bytes: int
    peak_bytes: int
    steps_per_epoch: int
    padding: float  # share of the audio
    seconds_per_epoch: float | None
    checkpoint_bytes: int
    checkpoints: int


def check_cost(planned: PlannedRun) -> Iterator[Finding]:
    """Find too little room, on the disk for the checkpoints and in memory for a step."""
    prediction = predict(planned)
    yield from _find_full_disk(planned, prediction)
    yield from _find_full_memory(planned, prediction)


def predict(planned: PlannedRun) -> Prediction:
    """Return what the small steps predict; they run once.

    Raises MissingPartError where a step cannot be taken, which other checks tell of.
    """
    if NAME not in planned.parts:
        if dry_run(planned).broken or dry_run(planned).mismatches:
            raise MissingPartError(NAME)
        planned.parts[NAME] = _predict(planned)
    prediction: Prediction = planned.parts[NAME]
    return prediction


def as_table(prediction: Prediction) -> str:
    """Write the figures for a person."""
    rows = [
        ("parameters", f"{prediction.parameters:,}"),
        ("memory of tensors at its peak", _megabytes(prediction.peak_bytes)),
        ("  model", _megabytes(prediction.model_bytes)),
        ("  gradients", _megabytes(prediction.gradient_bytes)),
        ("  optimizer", _megabytes(prediction.optimizer_bytes)),
        ("  activations of the largest batch", _megabytes(prediction.activation_bytes)),
        ("  the largest batch of validation", _megabytes(prediction.validation_bytes)),
        ("steps per epoch", f"{prediction.steps_per_epoch:,}"),
        ("padding", f"{prediction.padding:.1%} of the audio"),
        ("seconds per epoch", _seconds(prediction.seconds_per_epoch)),
        (
            "room for checkpoints",
            f"{prediction.checkpoints} files of {_megabytes(prediction.checkpoint_bytes)} each",
        ),
    ]
    return "\n".join(f"{name:<36}{value}" for name, value in rows)


def write_prediction(planned: PlannedRun) -> None:
    """Leave the prediction in the run folder, to be compared with what the run takes."""
    prediction = planned.parts.get(NAME)
    if prediction is not None and planned.run_folder is not None:
        planned.run_folder.mkdir(parents=True, exist_ok=True)
        file = planned.run_folder / PREDICTION
        write_text_atomically(file, to_json(asdict(prediction), indent=2) + "\n")


def _predict(planned: PlannedRun) -> Prediction:
    loaders = planned.loaders
    plan, accumulation = _plan(planned)
    valid = next(iter(loaders.valid.values()))
    evaluated = [batch for each in loaders.valid.values() for batch in each.batch_sampler]
    with brain_in_place(planned) as brain, unchanged(brain.modules, brain.device):
        memory = measure_step_memory(brain, loaders.train, plan)
        validation = measure_evaluation_memory(brain, valid, list(valid.batch_sampler))
        optimizer_bytes, update = try_optimizer(planned)
        seconds = None
        if planned.target is None:
            updates = update * (len(plan) // accumulation)
            seconds = round(_seconds_of_batches(planned, brain, plan) + updates, 2)
    modules = planned.brain.modules
    tensors = [*modules.parameters(), *modules.buffers()]
    gradients = bytes_of(each for each in tensors if each.requires_grad)
    activations = int(memory([size_of(batch) for batch in plan]).max())
    evaluation = int(validation([size_of(batch) for batch in evaluated]).max())
    step = gradients + activations if accumulation > 1 else max(gradients, activations)
    return Prediction(
        parameters=sum(each.numel() for each in modules.parameters()),
        model_bytes=bytes_of(tensors),
        gradient_bytes=gradients,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=activations,
        validation_bytes=evaluation,
        peak_bytes=bytes_of(tensors) + optimizer_bytes + max(step, evaluation),
        steps_per_epoch=len(plan) // accumulation,
        padding=_padding(plan),
        seconds_per_epoch=seconds,
        checkpoint_bytes=bytes_of(tensors) + optimizer_bytes,
        checkpoints=int(planned.knobs.get("average_checkpoints", 1)) + BESIDE_KEPT,
    )


@contextmanager
def brain_in_place(planned: PlannedRun) -> Iterator[Any]:
    """Yield a Brain on the device and in the precision of the run, then move the model back."""
    here = resolve("cpu", "fp32")
    if planned.target is not None or planned.placement == here:
        yield planned.brain
        return
    try:
        yield planned.make_brain(planned.placement)
    finally:
        planned.make_brain(here)


def _plan(planned: PlannedRun) -> tuple[list[MicroBatch], int]:
    """Return the first epoch's micro-batches of the first process, and how many make a step."""
    sampler = planned.loaders.train.batch_sampler
    if not isinstance(sampler, TrainSampler):
        raise MissingPartError(NAME)
    accumulation = int(planned.knobs.get("grad_accumulation_factor", 1))
    processes = count_processes(planned)
    shares = (split_batch(step, processes * accumulation)[::processes] for step in sampler.steps())
    return [each for share in shares for each in share], accumulation


def _seconds_of_batches(planned: PlannedRun, brain: Any, plan: list[MicroBatch]) -> float:
    """Predict the first process's share of an epoch: its training, and its validation."""
    loaders, processes = planned.loaders, count_processes(planned)
    training = time_steps(brain, loaders.train, plan)([size_of(batch) for batch in plan])
    valid = next(iter(loaders.valid.values()))
    validation = time_evaluation(brain, valid, list(valid.batch_sampler))
    shares = (list(each.batch_sampler)[::processes] for each in loaders.valid.values())
    evaluated = validation([size_of(batch) for share in shares for batch in share])
    return float(training.sum() + evaluated.sum())


def try_optimizer(planned: PlannedRun) -> tuple[int, float]:
    """Return the bytes that the optimizer keeps and its seconds, from a part of each parameter.

    Raises SbkitError where it cannot step.
    """
    trainable = [each for each in planned.brain.modules.parameters() if each.requires_grad]
    parts = [nn.Parameter(_part(each.detach())) for each in trainable]
    share = sum(each.numel() for each in trainable) / sum(each.numel() for each in parts)
    for part in parts:
        part.grad = torch.zeros_like(part)
    optimizer = planned.hparams["opt_class"](parts)
    try:
        optimizer.step()
    except Exception as error:  # whatever an optimizer raises of what it cannot step
        raise SbkitError(
            "`opt_class` must be able to step all parameters of the model, but raised "
            f"{type(error).__name__} ({error}). Choose another optimizer, or other parameters."
        ) from error
    begun = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - begun
    kept = (each for state in optimizer.state.values() for each in state.values())
    return int(share * bytes_of(each for each in kept if isinstance(each, Tensor))), share * seconds


def _part(parameter: Tensor) -> Tensor:
    """Copy its first rows: an optimizer may take a matrix otherwise than a vector."""
    if parameter.ndim == 0:
        return parameter.clone()
    row = max(parameter.numel() // max(len(parameter), 1), 1)
    return parameter[: max(OF_OPTIMIZER // row, 1)].clone()


def _padding(plan: list[MicroBatch]) -> float:
    padded = sum(len(batch) * max(each.samples for each in batch) for batch in plan)
    return round(1 - sum(each.samples for batch in plan for each in batch) / padded, 4)


def _find_full_disk(planned: PlannedRun, prediction: Prediction) -> Iterator[Finding]:
    if planned.run_folder is None or planned.target is not None:
        return
    files = (planned.run_folder / CHECKPOINTS).rglob("*")
    there = sum(file.stat().st_size for file in files if file.is_file())
    needed = prediction.checkpoints * prediction.checkpoint_bytes - there
    free = shutil.disk_usage(nearest_existing(planned.run_folder)).free
    if needed > free:
        yield planned.finding(
            "cost",
            "output_folder",
            declared=f"{planned.run_folder} must have room for {prediction.checkpoints:,} "
            f"checkpoints of {_megabytes(prediction.checkpoint_bytes)}",
            effect=f"they need {_megabytes(needed)} more, and {_megabytes(free)} are free there: "
            "the run would end with a full disk",
            fix="Choose an --output_folder with room, or lower --average_checkpoints.",
        )


def _find_full_memory(planned: PlannedRun, prediction: Prediction) -> Iterator[Finding]:
    free = free_memory(planned)
    if free is not None and prediction.peak_bytes > free:
        yield planned.finding(
            "cost",
            "batch_seconds",
            declared=f"a batch of {planned.knobs.get('batch_seconds')} s must fit into memory",
            effect=f"the largest takes about {_megabytes(prediction.peak_bytes)}, and "
            f"{_megabytes(free)} are free",
            fix="Raise --grad_accumulation_factor, or lower --batch_seconds.",
            stops=False,  # a prediction may be off by a fifth
        )


def free_memory(planned: PlannedRun) -> int | None:
    """Ask this machine; None for another one, or where it does not tell."""
    device = planned.placement.device
    if planned.target is not None:
        return None
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() if device.type == "cpu" else None


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _seconds(seconds: float | None) -> str:
    return "not known: --target is another machine" if seconds is None else f"{seconds:,.1f}"

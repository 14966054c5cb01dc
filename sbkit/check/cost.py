"""Memory, time and disk space of a run, measured by real training steps on its device."""

import gc
import math
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor, nn

from sbkit.audio.random_draws import seeded_draws
from sbkit.audio.segments import max_unsegmented_samples
from sbkit.base.errors import DeviceError, SbkitError
from sbkit.base.files import nearest_existing
from sbkit.base.libraries import place_of
from sbkit.base.machine import available_memory
from sbkit.base.messages import listed, plural
from sbkit.base.threads_and_memory import return_freed_memory
from sbkit.check.checked_run import CheckedRun, Cost, Finding, has_device, megabytes
from sbkit.check.dry_run import begin_training, small_batch, take_step
from sbkit.checkpoint.rng import preserve_rng
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.data.batch import Batch, Loader, UtteranceDataset
from sbkit.data.sampler import (
    EvalSampler,
    MicroBatch,
    RankSampler,
    padded_samples,
    padded_share,
    split_batch,
    step_sizes,
)
from sbkit.data.splits import sample_counts
from sbkit.distributed.device import ON_CPU, Placement
from sbkit.train.nonfinite import is_out_of_memory, memory_errors
from sbkit.train.ownership import device_errors
from sbkit.train.setup import build_again, make_brain

EXTRA_CHECKPOINTS = 3  # besides those to average: the newest, and the two of an epoch
KILOBYTE = 1024
# A share of the largest batch, on the CPU. From steps with one and two of these, its memory was
# predicted within 10 % with ctc.yaml, ctc_speechbrain.yaml and ctc_large.yaml (32 to 300 s).
PROBED_SHARE = 1 / 8


def check_cost(run: CheckedRun) -> Iterator[Finding]:
    """Report a batch that is too large for the memory, or checkpoints too large for the disk."""
    if not has_device(run.spec) or run.sampler is None:
        return  # nothing can be measured for another machine
    cost = run.cost = measure_cost(run, run.sampler)
    if cost.fp32_step_seconds is not None and cost.fp32_step_seconds < cost.step_seconds:
        yield run.note(
            "precision",
            problem=f"On this CPU, the largest step takes {cost.step_seconds} s in "
            f"{run.copy.placement.precision}, and {cost.fp32_step_seconds} s in fp32",
            fix="Set `precision: fp32`.",
        )
    folder = run.spec.folder
    files = [file for file in (folder / CHECKPOINTS).rglob("*") if file.is_file()]
    missing_bytes = cost.disk_bytes - sum(file.stat().st_size for file in files)
    free_bytes = shutil.disk_usage(nearest_existing(folder)).free
    if missing_bytes > free_bytes:
        yield run.finding(
            "output_folder",
            problem=f"{cost.num_checkpoints:,} checkpoints need {megabytes(missing_bytes)} more in "
            f"{folder}, where {megabytes(free_bytes)} are free",
            fix="Choose an `output_folder` with room, or lower `average_checkpoints`.",
        )


def measure_cost(run: CheckedRun, sampler: RankSampler) -> Cost:
    """Run a step with the largest batch, and estimate the time of all others from their audio."""
    num_processes = run.num_processes
    micro_batches_per_step = num_processes * run.accumulation
    steps_of_epoch = sampler.steps()
    # Those of the first process, whose first micro-batch of a step is the largest
    shares = range(0, micro_batches_per_step, num_processes)
    padded = [padded_share(steps_of_epoch, share, micro_batches_per_step) for share in shares]
    valid_loaders = run.copy.loaders.valid.values()
    valid_batches = [batch for loader in valid_loaders for batch in _batches_of(loader)]
    # Pauses, which augmentation may put around each utterance, widen many short ones most.
    most_in_batch = -(-step_sizes(steps_of_epoch) // micro_batches_per_step)
    chosen = np.argmax(padded[0]), np.argmax(most_in_batch)
    largest, most_utterances = (
        split_batch(steps_of_epoch[int(step)], micro_batches_per_step)[0] for step in chosen
    )

    placement = run.copy.placement
    device_bytes = _memory_of(placement.device)
    with real_steps(run) as steps:
        peak_bytes = 0
        if most_utterances != largest:
            peak_bytes, _ = _measure_step(steps, most_utterances)
        peak_of_largest, step_seconds = _measure_step(steps, largest)
        fp32_seconds = None
        if placement.device.type == "cpu" and placement.precision != "fp32":
            steps.brain.training_ctx = ON_CPU.autocast()
            with suppress(SbkitError):  # it may not fit into memory
                fp32_seconds = round(_measure_step(steps, largest)[1], 3)
            steps.reset_peak()
        parameters = list(steps.brain.modules.parameters())
        num_parameters = sum(p.numel() for p in parameters)
        num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
        peak_bytes = max(peak_bytes, peak_of_largest, _measure_evaluation(run, steps))
        checkpoint_bytes = steps.checkpoint_bytes

    train_samples = sum(int(samples.sum()) for samples in padded)
    valid_samples = sum(map(padded_samples, valid_batches)) / num_processes
    epoch_seconds = step_seconds * (train_samples + valid_samples) / padded_samples(largest)
    settings = run.spec.settings
    num_checkpoints = int(settings["average_checkpoints"]) + EXTRA_CHECKPOINTS
    max_seconds = 60 * settings["max_minutes"] or math.inf
    return Cost(
        parameters=num_parameters,
        trainable_parameters=num_trainable,
        steps_per_epoch=len(steps_of_epoch),
        peak_bytes=peak_bytes,
        device_bytes=device_bytes,
        step_seconds=round(step_seconds, 3),
        fp32_step_seconds=fp32_seconds,
        epoch_seconds=round(epoch_seconds, 2),
        run_seconds=round(min(epoch_seconds * run.last_epoch, max_seconds), 2),
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=num_checkpoints * checkpoint_bytes,
    )


def _batches_of(loader: Loader) -> Iterable[MicroBatch]:
    """Return the batches of a loader, those of all ranks if a sampler of sbkit plans them."""
    sampler = loader.batch_sampler
    return sampler.plan if isinstance(sampler, EvalSampler) else sampler or ()


def _memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; of any other device, what this process could allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    installed_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(available_memory(), installed_bytes)  # the first is unknown without /proc


def _measure_step(steps: "RealSteps", micro_batch: MicroBatch) -> tuple[int, float]:
    """Return the peak bytes and the seconds of a training step."""
    batch = steps.load(micro_batch)
    with memory_errors(batch):
        steps.require_memory(micro_batch)
        if steps.brain.device.type != "cpu":
            steps.run_step(batch)  # the first one compiles kernels and makes optimizer states
        seconds = steps.run_step(batch)
    return steps.peak_bytes, seconds


def _measure_evaluation(run: CheckedRun, steps: "RealSteps") -> int:
    """Return the peak bytes of the largest batch of an evaluation, without recordings to cut."""
    to_cut = {id for ids in recordings_to_cut(run).values() for id in ids}
    loaders = run.copy.loaders
    evaluated = (*loaders.valid.values(), *loaders.test.values())
    batches = [(loader, batch) for loader in evaluated for batch in _batches_of(loader)]
    for loader, micro_batch in sorted(batches, key=lambda pair: -padded_samples(pair[1])):
        batch = steps.load(micro_batch, loader)
        if to_cut.isdisjoint(batch.ids):
            with memory_errors(batch, "eval_batch_seconds"):
                if len(micro_batch) > 1:
                    steps.require_memory(micro_batch, loader, steps.evaluate)
                steps.evaluate(batch)
            return steps.peak_bytes
    return 0


def recordings_to_cut(run: CheckedRun) -> dict[str, list[str]]:
    """Return the ids of recordings longer than a batch that are run or decoded whole, by split.

    A recognizer encodes them in segments; in a test, it then decodes all segments together.
    """
    splits = run.data.splits
    cuts_dev = run.brain.evaluates_segments  # a recognizer decodes only those of test sets whole
    evaluated = splits.test if cuts_dev else splits.evaluated()
    settings = run.spec.settings
    max_samples = max_unsegmented_samples(settings["eval_batch_seconds"], settings["sample_rate"])
    return {
        name: rows.select(longer)["id"][:]
        for name, rows in evaluated.items()
        if len(longer := np.flatnonzero(sample_counts(rows) > max_samples))
    }


def check_recordings(run: CheckedRun) -> Iterator[Finding]:
    """Note recordings that are run or decoded whole, which takes gigabytes and minutes."""
    if run.sampler is None:
        return  # the batches may have other lengths
    for split, ids in recordings_to_cut(run).items():
        yield run.note(
            "eval_batch_seconds",
            problem=f"{split} has {plural(len(ids), 'recording')} longer than "
            f"`eval_batch_seconds`, decoded whole: {listed(ids)}. Each may take gigabytes",
            fix="Cut it into utterances, for example by `sbkit segment`.",
            ids=tuple(ids),
        )


class RealSteps:
    """Steps of a Brain with its optimizers: forward, backward, update; and evaluations.

    For the CPU it is the Brain of the dry run, whose optimizers have their states already.
    """

    def __init__(self, run: CheckedRun) -> None:
        placement, loaders = run.copy.placement, run.copy.loaders
        factor = min(2, run.accumulation)  # more micro-batches take the same memory
        self._loader = loaders.train
        if placement.device.type == "cpu":
            self.brain = run.brain
            self.brain.grad_accumulation_factor = factor
            self.brain.training_ctx = placement.autocast()
            precision = run.spec.settings["eval_precision"]
            self.brain.evaluation_ctx = Placement(placement.device, precision).autocast()
            self.brain.training_step.train_mode()
        else:
            run_copy = build_again(run.copy)
            self.brain = make_brain(run_copy, compile=False, grad_accumulation_factor=factor)
            begin_training(self.brain, loaders, small_batch(run.copy))

    def load(self, micro_batch: MicroBatch, loader: Loader | None = None) -> Batch:
        """Load a batch of a loader, by default of the training set."""
        loader = loader or self._loader
        dataset = cast(UtteranceDataset, loader.dataset)
        return cast(Batch, loader.collate_fn(dataset.__getitems__(micro_batch)))

    def evaluate(self, batch: Batch) -> None:
        """Evaluate a batch for its memory, with weights of 0: those of a few steps may be NaN."""
        self.brain.modules.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter in self.brain.modules.parameters():
                parameter.zero_()
            for buffer in self.brain.modules.buffers():
                buffer.nan_to_num_(0.0, 0.0, 0.0)
        self.brain.modules.eval()
        self.brain.on_stage_start(Stage.VALID, 1)
        self.brain.evaluate_batch(batch, Stage.VALID)

    def add_gradient(self, batch: Batch) -> None:
        """Run forward and backward as in a step, without a change of the weights."""
        brain = self.brain
        brain.grad_accumulation_factor, factor = 2, brain.grad_accumulation_factor
        brain.step = 1  # of two micro-batches
        with seeded_draws([]):
            brain.fit_batch(batch)
        brain.grad_accumulation_factor = factor

    def run_step(self, batch: Batch) -> float:
        """Run a step, and return the seconds of a micro-batch."""
        brain = self.brain
        brain.nonfinite_count = 0  # a step that is not finite costs as much
        start = time.perf_counter()
        try:
            with device_errors(brain):
                take_step(brain, batch)
        except SbkitError:
            raise
        except Exception as error:  # whatever a part or an optimizer raises on this device
            if is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            fix = ""
            if "same device" in reason:
                fix = " Make it a buffer of a module in `model`, or declare it in `helpers`."
            raise DeviceError(
                f"A training step on {brain.device} raised {type(error).__name__} ({reason}"
                f"{place_of(error)}).{fix}"
            ) from error
        if brain.device.type != "cpu":
            torch.get_device_module(brain.device).synchronize()
        return (time.perf_counter() - start) / int(brain.grad_accumulation_factor)

    def require_memory(
        self,
        micro_batch: MicroBatch,
        loader: Loader | None = None,
        run: Callable[[Batch], object] | None = None,
    ) -> None:
        """Raise OutOfMemoryError if a step would not fit on the CPU: Linux kills such a process.

        The memory is extrapolated from two shares of the batch, because some of it, such as that of
        converted weights, does not grow with the batch.

        loader: that of the batch. run: uses the batch; by default as a step of training does.
        """
        if self.brain.device.type != "cpu":
            return
        run = run or self.add_gradient
        longest_first = sorted(micro_batch, key=lambda example: example.samples, reverse=True)
        num_rows = max(1, int(PROBED_SHARE * len(micro_batch)))
        shares = [self.load(longest_first[: count * num_rows], loader) for count in (1, 2)]
        run(shares[0])  # makes the gradients
        free_bytes = available_memory()
        growths: list[int] = []  # bytes of each run beyond those that were held
        for share in shares:
            self.reset_peak()
            held_bytes = self.peak_bytes
            run(share)
            growths.append(self.peak_bytes - held_bytes)
        one_share, two_shares = growths
        needed_bytes = one_share + (len(micro_batch) / num_rows - 1) * (two_shares - one_share)
        if needed_bytes > free_bytes:
            raise torch.OutOfMemoryError(f"{needed_bytes:.0f} of {free_bytes} bytes")

    def reset_peak(self) -> None:
        """Make `peak_bytes` count from now on."""
        if self.brain.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.brain.device)
            return
        gc.collect()
        return_freed_memory()  # memory that earlier checks freed would count as held
        with suppress(OSError):  # only Linux can reset it
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """The most bytes held since `reset_peak` (outside Linux and a GPU: since the start)."""
        if self.brain.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.brain.device)
        return _peak_process_bytes()

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint: the model, its average, and the states of the optimizers."""
        optimizers = (self.brain.optimizers_dict or {}).values()
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        tensors += self.brain.training_step.moving_average.shadow.values()
        return _tensor_bytes(self.brain.modules) + sum(t.nbytes for t in tensors)


@contextmanager
def real_steps(run: CheckedRun) -> Iterator[RealSteps]:
    """Yield steps of a new Brain, on the device and in the precision of the run."""
    with preserve_rng(run.copy.placement.device):
        steps = RealSteps(run)
        try:
            steps.reset_peak()
            yield steps
        finally:
            del steps.brain  # training needs its memory
            gc.collect()
            torch.cuda.empty_cache()  # without CUDA it does nothing


def _peak_process_bytes() -> int:
    with suppress(OSError):  # only Linux has /proc
        status = Path("/proc/self/status").read_text()
        if peak := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return KILOBYTE * int(peak[1])
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else KILOBYTE * max_rss


def _tensor_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))

"""Small real steps of training, their time and memory, and a line through them.

Legend: B utterances of a micro-batch, S the length of its longest in UNITs. A step costs what
every step costs, more for all its audio (B S), and more for long utterances, since attention is
quadratic (B S S).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.data.batches.plan import MicroBatch
from sbkit.train.memory import measure_memory
from sbkit.train.step import training_loss

MEASURED = (0.1, 0.5, 0.9)  # quantiles of the lengths of a plan's batches
TIMED = (0.5, 0.05, 0.95, 0.35, 0.65)  # the first only warms up
UNIT = 16_000  # samples, whatever their rate: keeps the columns of the fit within one size
MEASURED_AUDIO, TIMED_AUDIO = 6.0, 40.0  # UNITs of padded audio in a probe at most
PATIENCE = 0.8  # seconds after which no further probe is timed

Sizes = tuple[int, float]
Once = Callable[[Any, Any], None]  # of a Brain and a batch
Numbers = npt.NDArray[np.float64]
ALL, PER_AUDIO = (1, 0, 2), (1,)  # terms of a line


@dataclass(frozen=True)
class LinearCost:
    """What a step costs, by its size."""

    terms: tuple[float, float, float]

    def __call__(self, sizes: Sequence[Sizes]) -> Numbers:
        """Return the cost of each micro-batch of B utterances of length S."""
        costs: Numbers = _columns(sizes) @ np.array(self.terms)
        return costs


def measure_step_memory(brain: Any, loader: Any, plan: Sequence[MicroBatch]) -> LinearCost:
    """Fit the most bytes that a step holds at a time, beside the model and its gradients."""
    with _dropping_gradients(brain.modules.parameters()):
        return _measure(brain, loader, probes(plan, MEASURED, MEASURED_AUDIO), _train, ALL)


def peak_of_step(brain: Any, loader: Any, batch: MicroBatch) -> int:
    """Return the most bytes that a real step holds at a time, beside the model and its gradients.

    Raises torch.OutOfMemoryError.
    """
    with _dropping_gradients(brain.modules.parameters()):
        return _peak(brain, loader, batch, _train)


def measure_evaluation_memory(brain: Any, loader: Any, plan: Sequence[MicroBatch]) -> LinearCost:
    """Fit the most bytes that a batch of validation holds at a time, beside the model."""
    chosen = probes(plan, MEASURED[1:], MEASURED_AUDIO)
    with _validating(brain):
        return _measure(brain, loader, chosen, _evaluate, PER_AUDIO)


def time_steps(brain: Any, loader: Any, plan: Sequence[MicroBatch]) -> LinearCost:
    """Fit the seconds of a step, reading its audio included."""
    return _time(brain, loader, plan, _train)


def time_evaluation(brain: Any, loader: Any, plan: Sequence[MicroBatch]) -> LinearCost:
    """Fit the seconds of a batch of validation, scoring included."""
    with _validating(brain):
        return _time(brain, loader, plan, _evaluate)


@contextmanager
def _dropping_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Drop each gradient as soon as it is there: it is counted by itself."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as stack:
        for each in parameters:
            if each.requires_grad:
                stack.enter_context(each.register_post_accumulate_grad_hook(drop))  # type: ignore[no-untyped-call]
        yield


@contextmanager
def _validating(brain: Any) -> Iterator[None]:
    brain.on_stage_start(Stage.VALID, 1)
    brain.modules.eval()
    yield


def probes(
    plan: Sequence[MicroBatch], quantiles: Iterable[float], units: float
) -> Iterator[MicroBatch]:
    """Choose micro-batches of several lengths, cut to so much padded audio."""
    by_length = sorted(plan, key=lambda batch: size_of(batch)[1])
    for quantile in quantiles:
        batch = by_length[int(quantile * (len(by_length) - 1))]
        yield batch[: max(1, int(units / size_of(batch)[1]))]


def size_of(batch: MicroBatch) -> Sizes:
    """Return B and S."""
    return len(batch), max(each.samples for each in batch) / UNIT


def fit(sizes: Sequence[Sizes], costs: Sequence[float], terms: Sequence[int] = ALL) -> LinearCost:
    """Find terms, none of them negative, that miss the costs least, in parts of each."""
    columns = _columns(sizes) / np.array(costs)[:, None]
    kept = list(terms)
    while True:
        found = np.linalg.lstsq(columns[:, kept], np.ones(len(costs)), rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    values = dict(zip(kept, found.tolist(), strict=True))
    return LinearCost((values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)))


def _measure(
    brain: Any, loader: Any, chosen: Iterable[MicroBatch], once: Once, terms: Sequence[int]
) -> LinearCost:
    batches = list(chosen)
    costs = [float(_peak(brain, loader, each, once)) for each in batches]
    return fit([size_of(each) for each in batches], costs, terms)


def _peak(brain: Any, loader: Any, batch: MicroBatch, once: Once) -> int:
    collated = _collate(loader, batch)
    model = [*brain.modules.parameters(), *brain.modules.buffers()]
    with measure_memory(model, brain.device) as memory:
        once(brain, collated)
    return memory.peak


def _time(brain: Any, loader: Any, plan: Sequence[MicroBatch], once: Once) -> LinearCost:
    """Time batches of their real size; a line with more than one term follows the noise instead."""
    sizes, costs = [], []
    start = time.perf_counter()
    for number, batch in enumerate(probes(plan, TIMED, TIMED_AUDIO)):
        begun = time.perf_counter()
        once(brain, _collate(loader, batch))
        if number:  # the first one warms up
            sizes.append(size_of(batch))
            costs.append(time.perf_counter() - begun)
        if costs and time.perf_counter() - start > PATIENCE:
            break
    return fit(sizes, costs, PER_AUDIO)


def _train(brain: Any, batch: Any) -> None:
    brain.train_mode()
    torch.autograd.backward(training_loss(brain, batch.to(brain.device)).sums.sum())
    brain.modules.zero_grad(set_to_none=True)
    if brain.device.type != "cpu":
        torch.get_device_module(brain.device).synchronize()


def _evaluate(brain: Any, batch: Any) -> None:
    brain.evaluate_batch(batch, Stage.VALID)


def _collate(loader: Any, batch: MicroBatch) -> Any:
    return loader.collate_fn(loader.dataset.__getitems__(batch))


def _columns(sizes: Sequence[Sizes]) -> Numbers:
    return np.array([[1.0, count * longest, count * longest**2] for count, longest in sizes])

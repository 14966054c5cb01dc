"""Where a run stands: the micro-batches of its epoch, and what is saved of its counters."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import yaml

from sbkit.checkpoint.rng import random_state

COUNTERS = ("step", "optimizer_step", "nonfinite_count")
OF_RESUME = ("resume_rng", "saved_accumulation")


def mark_last(
    batches: Iterable[Any], *, count: int | None, done: int
) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last of an epoch of which ``done`` were already seen.

    Where the number is not known, one batch is read ahead. That would do everywhere, but a loader
    that saves its place would be one too far.
    """
    if count is not None:
        yield from ((batch, number == count) for number, batch in enumerate(batches, done + 1))
        return
    for batch, following in pairwise(chain(batches, [None])):
        yield batch, following is None


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader, None where it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def share_of_steps(done: int, count: int | None, accumulation: int) -> float:
    """Return how much of an epoch lies before the step of the next micro-batch.

    In steps: a schedule that counted micro-batches would depend on the accumulation.
    """
    return (done // accumulation) / -(-count // accumulation) if count else 0.0


def write_counters(brain: Any, file: Path) -> None:
    """Write where a run stands: counters, sums of metrics, random state."""
    state = {name: getattr(brain, name) for name in COUNTERS}
    state["accumulation"] = brain.grad_accumulation_factor
    state |= brain._training_metrics.state()
    state["random"] = random_state(brain.device)
    file.write_text(json.dumps(state))


def read_counters(brain: Any, file: Path) -> None:
    """Set a Brain to where a run stood; ``resume_rng`` takes effect when training goes on."""
    text = file.read_text()  # a run that began under SpeechBrain left YAML, with fewer counters
    state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    for name in COUNTERS:
        setattr(brain, name, int(state.get(name, getattr(brain, name))))
    brain._training_metrics.restore(state)
    brain.resume_rng = state.get("random")
    brain.saved_accumulation = state.get("accumulation")


@contextmanager
def counters_kept(brain: Any) -> Iterator[None]:
    """Keep the counters of the whole run while an earlier checkpoint is loaded."""
    counters = {name: getattr(brain, name) for name in (*COUNTERS, *OF_RESUME)}
    sums = brain._training_metrics.state()
    yield
    for name, value in counters.items():
        setattr(brain, name, value)
    brain._training_metrics.restore(sums)

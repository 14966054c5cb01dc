"""What a Brain saves besides weights and optimizer: counters, sums of metrics, random state."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sbkit.base.files import read_regular
from sbkit.checkpoint.integrity import LARGEST
from sbkit.checkpoint.rng import check_count, check_number, check_random_state, random_state

COUNTERS = ("step", "optimizer_step", "nonfinite_count")
OF_RESUME = ("resume_rng", "saved_accumulation")
MOST_STEPS = 10**9  # a thousand steps a second for eleven days


def write_counters(brain: Any, file: Path) -> None:
    """Write where a run stands."""
    state = {name: getattr(brain, name) for name in COUNTERS}
    state["accumulation"] = brain.grad_accumulation_factor
    state |= brain._training_metrics.state()
    state["random"] = random_state(brain.device)
    file.write_text(json.dumps(state))


def read_counters(brain: Any, file: Path) -> None:
    """Set a Brain to where a run stood; ``resume_rng`` takes effect when training goes on.

    Raises ValueError for what no run can have written.
    """
    text = read_regular(file.resolve(), largest=LARGEST, what="The state of a run").decode()
    # A run that began under SpeechBrain left YAML, with fewer counters.
    state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    check_brain_state(state)
    for name in COUNTERS:
        setattr(brain, name, state.get(name, getattr(brain, name)))
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


def check_brain_state(state: Any) -> None:
    """Raise ValueError for what no Brain can have saved, before any of it is taken up."""
    if not isinstance(state, Mapping):
        raise ValueError(f"it holds a {type(state).__name__}")
    for name in COUNTERS:
        if name in state:
            check_count(name, state[name], MOST_STEPS)
    accumulation = state.get("accumulation", 1)
    check_count("accumulation", accumulation, MOST_STEPS)
    if accumulation == 0:
        raise ValueError("`accumulation` is 0, of which no step is made")
    for name in ("so_far", "unread"):
        totals = state.get(name, {})
        if not isinstance(totals, Mapping):
            raise ValueError(f"`{name}` is a {type(totals).__name__}")
        for key, value in totals.items():
            check_number(f"{name}.{key}", value)
    for name in ("train_seconds", "audio_seconds"):
        check_number(name, state.get(name, 0.0))
    if state.get("random") is not None:
        check_random_state(state["random"])

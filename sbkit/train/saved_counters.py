"""What a Brain saves besides weights and optimizer: counters, sums of metrics, random state."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sbkit.checkpoint.brain_state import check_brain_state
from sbkit.checkpoint.rng import random_state

COUNTERS = ("step", "optimizer_step", "nonfinite_count")


def write_counters(brain: Any, file: Path) -> None:
    """Write where a run stands."""
    state = {name: getattr(brain, name) for name in COUNTERS}
    state |= brain.training_metrics.state()
    state["random"] = random_state(brain.device)
    file.write_text(json.dumps(state))


def read_counters(brain: Any, file: Path) -> None:
    """Set a Brain to where a run stood; ``resume_rng`` is set when training goes on.

    Raises ValueError for what no run can have written.
    """
    text = file.read_text()
    # A run that began under SpeechBrain left YAML, with fewer counters.
    state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    check_brain_state(state, COUNTERS)
    for name in COUNTERS:
        setattr(brain, name, state.get(name, getattr(brain, name)))
    brain.training_metrics.restore(state)
    brain.resume_rng = state.get("random")


@contextmanager
def counters_kept(brain: Any) -> Iterator[None]:
    """Keep the counters of the whole run while an earlier checkpoint is loaded."""
    counters = {name: getattr(brain, name) for name in (*COUNTERS, "resume_rng")}
    sums = brain.training_metrics.state()
    yield
    for name, value in counters.items():
        setattr(brain, name, value)
    brain.training_metrics.restore(sums)

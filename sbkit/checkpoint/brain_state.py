"""Whether the counters and the random state in a checkpoint are ones that training can leave."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

MOST_STEPS = 10**9  # a thousand steps a second for eleven days
MOST_EPOCHS = 10**6
PYTHON_WORDS = 625  # of Python's Mersenne twister: its state and its place in it
NUMPY_WORDS = 624


def check_brain_state(state: Any, counters: Iterable[str]) -> None:
    """Check what a Brain saved before any of it is taken up.

    Raises ValueError, which whoever reads the file makes a sentence of.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"it holds a {type(state).__name__}")
    for name in counters:
        if name in state:
            check_count(name, state[name], MOST_STEPS)
    for name in ("so_far", "unread"):
        totals = state.get(name, {})
        if not isinstance(totals, Mapping):
            raise ValueError(f"`{name}` is a {type(totals).__name__}")
        for key, value in totals.items():
            _check_number(f"{name}.{key}", value)
    for name in ("train_seconds", "audio_seconds"):
        _check_number(name, state.get(name, 0.0))
    if state.get("random") is not None:
        _check_random(state["random"])


def check_count(name: str, value: Any, most: int) -> None:
    """Check a counter: a whole number from 0 to below ``most``; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"`{name}` is {str(value)[:40]!r} and no whole number from 0 to {most}")


def _check_number(name: str, value: Any) -> None:
    """Check a sum, which is NaN or infinite after a bad batch; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` is {str(value)[:40]!r} and no number")


def _check_random(state: Any) -> None:
    """Check that the generators can be set to it; they stay as they are."""
    version, words, gauss = state["python"]
    if version != 3 or len(words) != PYTHON_WORDS:
        raise ValueError("`random.python` is no state of Python's generator")
    if not all(type(each) is int and 0 <= each < 2**32 for each in words):
        raise ValueError("`random.python` holds something else than its words")
    if gauss is not None:
        _check_number("random.python", gauss)
    random.Random().setstate((version, tuple(words), gauss))
    _check_numpy(state["numpy"])
    for kind in state.keys() - {"python", "numpy"}:
        bytes.fromhex(state[kind])
    cpu = bytearray.fromhex(state["cpu"])
    torch.Generator().set_state(torch.frombuffer(cpu, dtype=torch.uint8))


def _check_numpy(state: Any) -> None:
    """Check a state of NumPy's generator, which would read on from any place, also outside."""
    place = state["state"]["pos"]
    if len(state["state"]["key"]) != NUMPY_WORDS or type(place) is not int:
        raise ValueError("`random.numpy` is no state of NumPy's generator")
    check_count("random.numpy.state.pos", place, NUMPY_WORDS + 1)
    _check_number("random.numpy.gauss", state["gauss"])
    trial: Any = np.random.RandomState()
    trial.set_state(state)

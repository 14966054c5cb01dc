"""The state of the random generators: saved as JSON, checked, and restored."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbkit.distributed.ranks import rank

PYTHON_WORDS = 625  # of Python's Mersenne twister: its state and its place in it
NUMPY_WORDS = 624

State = dict[str, Any]
TorchState = dict[str, Tensor]  # by type of device


def torch_state(device: torch.device) -> TorchState:
    """Return the state of torch's generators: that of the CPU, and that of a device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_torch_state(state: TorchState, device: torch.device) -> None:
    """Set the generators to a state of `torch_state`; a device that it is not of stays."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def check_torch_state(state: Any) -> None:
    """Check that torch's generators could be set to a state; raises what they would raise."""
    torch.Generator().set_state(state["cpu"])


def seed_step(seed: int, *, epoch: int, step: int) -> None:
    """Set torch's generators by the place in the run, different on every rank."""
    place = (seed, epoch, step, rank())
    torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Leave every generator where it was, whatever is drawn here."""
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        restore_torch_state(torchs, device)


def random_state(device: torch.device) -> State:
    """Return the state of the generators of Python, NumPy and torch, and that of a device."""
    numpys: Any = np.random.get_state(legacy=False)
    numpys["state"]["key"] = numpys["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpys,
        **{kind: each.numpy().tobytes().hex() for kind, each in torch_state(device).items()},
    }


def restore_random_state(state: State, device: torch.device) -> None:
    """Set the generators to a state of `random_state`, also once JSON has made lists of its tuples.

    The other ranks branch off it, each its own way; a device that the state is not of stays.
    """
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])
    kinds = {"cpu", device.type} & state.keys()
    restore_torch_state({kind: _from_hex(state[kind]) for kind in kinds}, device)
    if rank() > 0:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank())


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def check_random_state(state: Any) -> None:
    """Check that the generators could be set to a state of `random_state`; they stay as they are.

    Raises ValueError, or what a generator raises.
    """
    version, words, gauss = state["python"]
    if version != 3 or len(words) != PYTHON_WORDS:
        raise ValueError("`random.python` is no state of Python's generator")
    if not all(type(each) is int and 0 <= each < 2**32 for each in words):
        raise ValueError("`random.python` holds something else than its words")
    if gauss is not None:
        check_number("random.python", gauss)
    random.Random().setstate((version, tuple(words), gauss))
    _check_numpy(state["numpy"])
    for kind in state.keys() - {"python", "numpy"}:
        bytes.fromhex(state[kind])
    check_torch_state({"cpu": _from_hex(state["cpu"])})


def _check_numpy(state: Any) -> None:
    """Check a state of NumPy's generator, which would read on from any place, also outside."""
    place = state["state"]["pos"]
    if len(state["state"]["key"]) != NUMPY_WORDS or type(place) is not int:
        raise ValueError("`random.numpy` is no state of NumPy's generator")
    check_count("random.numpy.state.pos", place, NUMPY_WORDS + 1)
    check_number("random.numpy.gauss", state["gauss"])
    trial: Any = np.random.RandomState()
    trial.set_state(state)


def check_count(name: str, value: Any, most: int) -> None:
    """Check a counter: a whole number from 0 to below ``most``; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"`{name}` is {str(value)[:40]!r} and no whole number from 0 to {most}")


def check_number(name: str, value: Any) -> None:
    """Check a sum, which is NaN or infinite after a bad batch; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` is {str(value)[:40]!r} and no number")

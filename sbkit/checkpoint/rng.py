"""The state of the random generators: saved as JSON and restored."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbkit.distributed.ranks import rank

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

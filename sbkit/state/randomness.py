"""What the random generators would draw next, as JSON keeps it."""

import random
from typing import Any

import numpy as np
import torch

from sbkit.tensors.distributed import rank

State = dict[str, Any]


def random_state(device: torch.device) -> State:
    """Take down the generators of Python, NumPy and torch, and that of a device."""
    numpys: Any = np.random.get_state(legacy=False)
    numpys["state"]["key"] = numpys["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpys,
        "cpu": _to_hex(torch.get_rng_state()),
        device.type: _to_hex(_generators(device).get_rng_state()),
    }


def restore_random_state(state: State, device: torch.device) -> None:
    """Set the generators to a state of `random_state`, also once JSON has made lists of its tuples.

    The other ranks branch off it, each its own way; a device that the state is not of stays.
    """
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_hex(state["cpu"]))
    if device.type in state:
        _generators(device).set_rng_state(_from_hex(state[device.type]))
    if rank() > 0:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank())


def _generators(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

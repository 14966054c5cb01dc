"""Save the states of the random generators as JSON, and restore them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.distributed.ranks import rank

RandomState = dict[str, Any]


def seed_torch(seed: int, *, epoch: int, micro_batch: int) -> None:
    """Seed torch, which draws dropout, from the position in the run and the rank."""
    position = (seed, epoch, micro_batch, rank())
    torch.manual_seed(int(np.random.SeedSequence(position).generate_state(1)[0]))


_run_lock = threading.RLock()


@contextmanager
def isolated_rng(device: torch.device) -> Iterator[None]:
    """Let a run use torch's generators, and restore them afterwards.

    They belong to the process: raises SbkitError if a run in another thread is using them.
    """
    if not _run_lock.acquire(blocking=False):
        raise SbkitError(
            "Another thread of this process is training. Start each run in its own process."
        )
    try:
        with preserve_rng(device):
            yield
    finally:
        _run_lock.release()


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore every generator after a `with` statement."""
    state = random_state(device)
    try:
        yield
    finally:
        _restore(state, device)


def random_state(device: torch.device) -> RandomState:
    """Return the states of the generators of Python, NumPy, torch and a device."""
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state: RandomState = {"python": random.getstate(), "numpy": numpy_state}
    state["cpu"] = _to_hex(torch.get_rng_state())
    if device.type != "cpu":
        state[device.type] = _to_hex(torch.get_device_module(device).get_rng_state(device))
    return state


def restore_random_state(state: RandomState | None, device: torch.device) -> None:
    """Set the generators to a state from `random_state`, which may have been stored as JSON.

    On ranks above 0, torch is then reseeded by rank. A device without a saved state is left as it
    is; if ``state`` is None, nothing changes.
    """
    if state is None:
        return
    _restore(state, device)
    if rank() > 0:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank())


def _restore(state: RandomState, device: torch.device) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_hex(state["cpu"]))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(_from_hex(state[device.type]), device)


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

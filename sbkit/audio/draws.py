"""Random numbers by utterance: the same in any batch, on any number of processes, and resumed.

The Brain says before each batch which utterances it has, and which step of the run it belongs to.
Each utterance has numbers of its own, which follow from the seed, the epoch and its id; a step has
others. SplitMix64 (Steele et al. 2014) computes any number of a sequence directly, so a batch takes
a few operations of NumPy.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)

Keys = npt.NDArray[np.uint64]


@dataclass
class _Streams:
    """Keys (B,) of the utterances and (1,) of the step, and how often was drawn from them."""

    utterances: Keys
    step: Keys
    calls: int = 0


def seed_draws(ids: Sequence[str], *, seed: int = 0, epoch: int = 0, step: int = 0) -> None:
    """Begin a batch of utterances, in the order of its rows; without ids, torch's generator draws.

    epoch: 0 in evaluation; step: of the optimizer.
    """
    _current.utterances = _keys(f"{seed} {epoch} {name}" for name in ids)
    _current.step = _keys([f"step {seed} {epoch} {step}"] if ids else [])
    _current.calls = 0


def draw_uniform(utterances: int, *shape: int) -> Tensor:
    """Draw numbers from 0 to below 1 for each utterance of the batch: -> (B, *shape) on the CPU.

    Each call gives other numbers. What has not as many rows as the batch, or is no batch of a
    Brain, has those of torch's generator.
    """
    return _draw(_current.utterances, utterances, shape)


def draw_for_step(*shape: int) -> Tensor:
    """Draw what all utterances of a step share, on every process: -> shape on the CPU."""
    return _draw(_current.step, 1, shape)[0]


def _draw(keys: Keys, rows: int, shape: tuple[int, ...]) -> Tensor:
    if len(keys) != rows:
        return torch.rand(rows, *shape, device="cpu")
    _current.calls += 1
    streams = _mix(keys + np.array([_current.calls], np.uint64) * GOLDEN_GAMMA)  # (B,)
    places = np.arange(1, prod(shape) + 1, dtype=np.uint64) * GOLDEN_GAMMA
    bits = _mix(streams[:, None] + places) >> np.uint64(40)  # as many as a float32 holds
    return torch.from_numpy(bits.astype(np.float32) / np.float32(1 << 24)).view(rows, *shape)


def _mix(x: Keys) -> Keys:
    """Return the output of SplitMix64 for states."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(names: Iterable[str]) -> Keys:
    digests = b"".join(hashlib.blake2b(each.encode(), digest_size=8).digest() for each in names)
    return np.frombuffer(digests, np.uint64)


_current = _Streams(_keys([]), _keys([]))  # as torch has a default generator

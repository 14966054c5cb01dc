"""Random numbers by utterance: the same in any batch, on any number of processes, and resumed.

They follow from the seed, the epoch and the utterance's id, which the Brain sets before each batch;
a step of the optimizer has numbers of its own. SplitMix64 (Steele et al. 2014) computes any number
of a sequence directly, so a batch takes a few operations of NumPy.
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
class _Batch:
    utterances: Keys  # (B,)
    step: Keys  # (1,)
    calls: int = 0  # so that two masks of an utterance differ


def seed_draws(ids: Sequence[str], *, seed: int = 0, epoch: int = 0, step: int = 0) -> None:
    """Begin a batch of utterances, epoch 0 in evaluation; without ids, torch's generator draws."""
    _batch.utterances = _hash(f"{seed} {epoch} {name}" for name in ids)
    _batch.step = _hash([f"step {seed} {epoch} {step}"] if ids else [])
    _batch.calls = 0


def draw_uniform(utterances: int, *shape: int) -> Tensor:
    """Draw numbers from 0 to below 1 for each utterance of the batch: -> (B, *shape) on the CPU.

    Each call gives others. Rows that are not those of a Brain's batch are drawn by torch.
    """
    return _draw(_batch.utterances, utterances, shape)


def draw_for_step(*shape: int) -> Tensor:
    """Draw what all utterances of a step share, on every process: -> shape, on the CPU."""
    return _draw(_batch.step, 1, shape)[0]


def _draw(keys: Keys, rows: int, shape: tuple[int, ...]) -> Tensor:
    if len(keys) != rows:
        return torch.rand(rows, *shape, device="cpu")
    _batch.calls += 1
    streams = _mix(keys + np.array([_batch.calls], np.uint64) * GOLDEN_GAMMA)
    places = np.arange(1, prod(shape) + 1, dtype=np.uint64) * GOLDEN_GAMMA
    bits = _mix(streams[:, None] + places) >> np.uint64(40)  # as many as a float32 holds
    return torch.from_numpy(bits.astype(np.float32) / np.float32(1 << 24)).view(rows, *shape)


def _mix(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(names: Iterable[str]) -> Keys:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), np.uint64)


_batch = _Batch(_hash([]), _hash([]))  # the current one, as torch has a default generator

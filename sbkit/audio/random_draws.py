"""Random numbers that belong to an utterance, in any batch, on any rank and after a resumption.

They follow from the seed, the epoch and the utterance's id, or the step. SplitMix64 (Steele et al.
2014) computes any number of a sequence directly, so a batch takes a few operations of NumPy.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)

DrawKeys = npt.NDArray[np.uint64]


@dataclass
class _BatchKeys:
    utterances: DrawKeys  # (B,)
    step: DrawKeys  # (1,)
    calls: int = 0  # so that two masks of an utterance differ


@contextmanager
def seeded_draws(
    ids: Sequence[str], *, seed: int = 0, epoch: int = 0, step: int = 0
) -> Iterator[None]:
    """Seed `draw_uniform` and `draw_for_step` inside the context by utterances and step.

    Evaluation has epoch 0. Without ids, and outside the context, torch's generator draws.

    >>> with seeded_draws(["clip-a", "clip-b"]):
    ...     numbers = draw_uniform(2, 3)
    >>> with seeded_draws(["clip-b"]):
    ...     torch.equal(draw_uniform(1, 3)[0], numbers[1])
    True
    """
    global _batch
    outer = _batch
    utterances = _hash(f"{seed} {epoch} {name}" for name in ids)
    _batch = _BatchKeys(utterances, _hash([f"step {seed} {epoch} {step}"] if ids else []))
    try:
        yield
    finally:
        _batch = outer


def draw_uniform(utterances: int, *shape: int) -> Tensor:
    """Draw numbers from 0 to below 1 for each utterance of the batch: -> (B, *shape) on the CPU.

    If ``utterances`` is not the size of the batch, torch draws.
    """
    return _draw(_batch.utterances, utterances, shape)


def draw_for_step(*shape: int) -> Tensor:
    """Draw numbers that all utterances of a step share, on every process: -> shape, on the CPU."""
    return _draw(_batch.step, 1, shape)[0]


def _draw(keys: DrawKeys, rows: int, shape: tuple[int, ...]) -> Tensor:
    if len(keys) != rows:
        return torch.rand(rows, *shape, device="cpu")
    _batch.calls += 1
    streams = _mix(keys + np.array([_batch.calls], np.uint64) * GOLDEN_GAMMA)
    offsets = np.arange(1, prod(shape) + 1, dtype=np.uint64) * GOLDEN_GAMMA
    bits = _mix(streams[:, None] + offsets) >> np.uint64(40)  # the 24 bits that a float32 holds
    return torch.from_numpy(bits.astype(np.float32) / np.float32(1 << 24)).view(rows, *shape)


def _mix(x: DrawKeys) -> DrawKeys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(names: Iterable[str]) -> DrawKeys:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), np.uint64)


_batch = _BatchKeys(_hash([]), _hash([]))  # the keys of the innermost context

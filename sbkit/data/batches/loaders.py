"""The loaders of a run: planned batches of its training set, and every other split in order."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader

from sbkit.base.errors import SbkitError
from sbkit.base.units import seconds_to_samples
from sbkit.data.batches.batch import make_loader
from sbkit.data.batches.sampler import EvalSampler, TrainSampler
from sbkit.data.storage.columns import sample_counts, shard_numbers
from sbkit.data.storage.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank, world_size

SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches; 64 MB in Docker
READ_AHEAD = 2  # batches of each worker, torch's default

Loader = DataLoader[dict[str, Any]]


@dataclass(frozen=True)
class Loaders:
    """Batches of every split.

    train: the global batches of the epoch, this rank's share; valid, test: each split in order, by
    its name; measure: the training set in order, to measure its features; splits: what they read.
    """

    train: Loader
    valid: Mapping[str, Loader]
    test: Mapping[str, Loader]
    measure: Loader
    splits: Splits


def make_loaders(
    splits: Splits,
    knobs: Mapping[str, Any],
    *,
    collate: Callable[[Sequence[Any]], Any],
    placement: Placement,
) -> Loaders:
    """Plan the batches of every split from the knobs of the YAML.

    `shuffle_shards`, `concat_prob` and `speeds` may be absent.

    Raises:
        SbkitError: there is too little shared memory for as many workers.
    """
    if knobs["num_workers"] > 0:
        _require_shared_memory(knobs)
    shared = {"rank": rank(), "world_size": world_size(), "sample_rate": knobs["sample_rate"]}
    options: dict[str, Any] = {
        "collate": collate,
        "num_workers": knobs["num_workers"],
        "pin_memory": placement.device.type == "cuda",
    }
    train = TrainSampler(
        samples=sample_counts(splits.train),
        batch_seconds=knobs["batch_seconds"],
        seed=knobs["seed"],
        concat_prob=knobs.get("concat_prob", 0.0),
        speeds=knobs.get("speeds", [1.0]),
        shards=shard_numbers(splits.train),
        shuffle_shards=knobs.get("shuffle_shards", 8),
        accumulation=knobs["grad_accumulation_factor"],
        **shared,
    )

    def in_order(split: datasets.Dataset) -> Loader:
        seconds = knobs["eval_batch_seconds"]
        sampler = EvalSampler(samples=sample_counts(split), batch_seconds=seconds, **shared)
        return make_loader(split, sampler=sampler, **options)

    return Loaders(
        train=make_loader(splits.train, sampler=train, **options),
        valid={name: in_order(split) for name, split in splits.valid.items()},
        test={name: in_order(split) for name, split in splits.test.items()},
        measure=in_order(splits.train),
        splits=splits,
    )


def _require_shared_memory(knobs: Mapping[str, Any]) -> None:
    """Raise SbkitError where batches have no room: the run would wait for a lost one."""
    count, processes = knobs["num_workers"], int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    train = knobs["batch_seconds"] / world_size() / knobs["grad_accumulation_factor"]
    seconds = max(train, knobs["eval_batch_seconds"])
    batch = seconds_to_samples(seconds, knobs["sample_rate"]) * np.dtype(np.int16).itemsize
    needed = READ_AHEAD * count * processes * batch
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else needed
    if free < needed:
        raise SbkitError(
            f"`num_workers` must leave room for {READ_AHEAD} batches of each in shared memory "
            f"({needed / 1e6:.0f} MB in all), but {SHARED_MEMORY} has {free / 1e6:.0f} MB. Enlarge "
            "it (in Docker: --shm-size), or lower --num_workers."
        )

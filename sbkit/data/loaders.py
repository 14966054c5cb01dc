"""The loaders of a run: planned batches of its training set, and every other split in order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
from torch.utils.data import DataLoader

from sbkit.data.batch import make_loader
from sbkit.data.columns import sample_counts, shard_numbers
from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank, world_size

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

    It reads `batch_seconds`, `grad_accumulation_factor`, `eval_batch_seconds`, `num_workers`,
    `sample_rate`, `seed`, `shuffle_shards`, `concat_prob` and `speeds`; the last three may be
    absent.
    """
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

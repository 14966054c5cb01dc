"""From rows of a store to tensors.

Legend: B utterances, S samples, L tokens.

The loaders of a run: planned batches of its training set, and every other split in order.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, Self

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from sbkit.audio.augment import SpeedGroup
from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds, seconds_to_samples
from sbkit.data.manifest import RESERVED_COLUMNS
from sbkit.data.plan import Example
from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits, sample_counts, shard_numbers
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank, world_size
from sbkit.text.tokenizer import SPACE, Tokenizer

LEAVE = signal.SIGUSR2  # what a worker still answers to
OWN = frozenset(RESERVED_COLUMNS) - {"sentence"}  # of a row; the rest travels as it is


def user_columns(names: Sequence[str]) -> list[str]:
    """Return the columns that are the corpus's, such as `speaker`, not sbkit's own."""
    return [each for each in names if each not in OWN]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Audio side by side, with absolute lengths. A recipe adds its labels in a class of its own.

    Attributes:
        ids: the utterances' ids.
        columns: what else the manifest says of each utterance, by the name of the column.
        audio: (B, S) int16, zero past each length; it becomes float on the device.
        audio_lengths: (B,) samples, on the CPU like all lengths.
        weights: (B,) 1, or 0 for an utterance that only fills a rank's empty share.
        speed_groups: which utterances are played at which speed, in the order of the rows.
        seconds: audio in the batch, without padding and what has no weight.
    """

    ON_DEVICE: ClassVar[tuple[str, ...]] = ("audio", "weights")  # tensors that are no lengths

    ids: list[str]
    columns: Mapping[str, list[str]]
    audio: Tensor
    audio_lengths: Tensor
    weights: Tensor
    speed_groups: tuple[SpeedGroup, ...]
    seconds: float

    def to(self, device: torch.device) -> Self:
        """Move the tensors but for the lengths; the host does not wait when they are pinned."""
        moved = {n: getattr(self, n).to(device, non_blocking=True) for n in self.ON_DEVICE}
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """Pin the tensors; DataLoader calls this when there is a GPU."""
        return replace(self, **{n: getattr(self, n).pin_memory() for n in self.ON_DEVICE})

    def clips(self) -> Iterator[Samples]:
        """Yield the audio of each utterance, (S,)."""
        for row, count in zip(self.audio.cpu().numpy(), self.audio_lengths.tolist(), strict=True):
            yield row[:count]

    def take(self, rows: slice) -> Self:
        """Return some utterances, without the padding of the others."""
        lengths = self.audio_lengths[rows]
        percents = [each.percent for each in self.speed_groups for _ in range(each.utterances)]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            n: v[rows] for n, v in values.items() if isinstance(v, Tensor | list)
        }
        weights = self.weights.cpu()
        share = self.seconds / max(1, int((self.audio_lengths * weights).sum()))
        return replace(
            self,
            **taken | {"audio": self.audio[rows, : int(lengths.max())]},
            columns={name: column[rows] for name, column in self.columns.items()},
            speed_groups=tuple(_speed_groups(percents[rows], lengths.tolist())),
            seconds=share * int((lengths * weights[rows]).sum()),
        )

    @property
    def speakers(self) -> list[str]:
        """Return the speaker of each utterance, "" where the manifest names none."""
        return list(self.columns.get("speaker", [""] * len(self)))

    def __len__(self) -> int:
        """Count the utterances."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class TextBatch(Batch):
    """Audio and its transcripts.

    Attributes:
        texts: the normalized transcripts.
        tokens: (B, L) label ids, the blank past each length.
        token_lengths: (B,) labels of each.
    """

    ON_DEVICE = (*Batch.ON_DEVICE, "tokens")

    texts: list[str]
    tokens: Tensor
    token_lengths: Tensor

    def take(self, rows: slice) -> Self:
        """Return some utterances, without the padding of the others."""
        some = super().take(rows)
        return replace(some, tokens=some.tokens[:, : int(some.token_lengths.max())])


class UtteranceDataset(Dataset[dict[str, Any]]):
    """Read the rows of many examples at once, and join those of each."""

    def __init__(self, store: datasets.Dataset) -> None:
        self._store = store

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read one row."""
        return self.__getitems__([row])[0]

    def __getitems__(self, planned: Sequence[Example | int]) -> list[dict[str, Any]]:
        """Read examples, or rows by their numbers, with one look-up, in the order of speeds."""
        examples = [each if isinstance(each, Example) else Example((each,), 0) for each in planned]
        examples.sort(key=lambda each: each.percent)
        wanted = [row for each in examples for row in each.rows]
        rows = read_rows(self._store, wanted, at_once=len(wanted))
        return [_join(list(islice(rows, len(each.rows))), each) for each in examples]

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._store)


def _join(rows: Sequence[dict[str, Any]], example: Example) -> dict[str, Any]:
    """Concatenate rows; columns in which they differ are joined by "+"."""
    columns = {
        name: "+".join(dict.fromkeys(row[name] or "" for row in rows))
        for name in rows[0]
        if name not in OWN
    }
    return columns | {
        "id": "+".join(row["id"] for row in rows),
        "text": " ".join(row["text"] for row in rows),
        "audio": np.concatenate([row["audio"] for row in rows]),
        "samples": sum(row["samples"] for row in rows),
        "percent": example.percent,
        "weight": example.weight,
    }


def collate_audio(rows: Sequence[Mapping[str, Any]], sample_rate: int) -> dict[str, Any]:
    """Return the fields of a `Batch`, for a collate function that adds its labels."""
    audio = [torch.from_numpy(row["audio"]) for row in rows]
    counted = sum(row["samples"] * row["weight"] for row in rows)
    return {
        "ids": [row["id"] for row in rows],
        "columns": {name: [row[name] for row in rows] for name in rows[0] if name not in OWN},
        "audio": pad_sequence(audio, batch_first=True),
        "audio_lengths": torch.tensor([len(clip) for clip in audio]),
        "weights": torch.tensor([row["weight"] for row in rows]),
        "speed_groups": tuple(
            _speed_groups([row["percent"] for row in rows], [row["samples"] for row in rows])
        ),
        "seconds": samples_to_seconds(counted, sample_rate),
    }


class TextCollate:
    """Pad utterances to a batch, and encode their texts.

    Rows that are joined have a space between them, which a language without spaces has no label
    for: it is left out, where half of the default YAML's examples would have `<unk>` there.
    """

    def __init__(self, tokenizer: Tokenizer, sample_rate: int = SAMPLE_RATE) -> None:
        self._tokenizer, self._sample_rate = tokenizer, sample_rate
        self._separator = " " if any(SPACE in piece for piece in tokenizer.pieces()) else ""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> TextBatch:
        """Make one batch; an id that no loss may see is refused here, on the CPU."""
        tokens = [torch.tensor(self._encode(row), dtype=torch.int64) for row in rows]
        blank = self._tokenizer.vocabulary.blank
        return TextBatch(
            **collate_audio(rows, self._sample_rate),
            texts=[row["text"] for row in rows],
            tokens=pad_sequence(tokens, batch_first=True, padding_value=blank),
            token_lengths=torch.tensor([len(ids) for ids in tokens]),
        )

    def _encode(self, row: dict[str, Any]) -> list[int]:
        ids = self._tokenizer.encode(row["text"].replace(" ", self._separator))
        self._tokenizer.vocabulary.check_targets(ids, of=row["id"])
        return ids


def _speed_groups(percents: Sequence[int], samples: Sequence[int]) -> Iterator[SpeedGroup]:
    """Group utterances that follow one another at one speed; samples are before that."""
    for percent, run in groupby(zip(percents, samples, strict=True), key=lambda each: each[0]):
        lengths = [length for _, length in run]
        yield SpeedGroup(percent=percent, utterances=len(lengths), longest=max(lengths))


def make_loader(
    store: datasets.Dataset,
    *,
    sampler: TrainSampler | EvalSampler,
    collate: Callable[[Sequence[Any]], Any],
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[dict[str, Any]]:
    """Load the sampler's micro-batches in its order."""
    if num_workers > 0:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    return DataLoader(
        UtteranceDataset(store),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=_leave_signals_alone,
        pin_memory=pin_memory,
    )


def _leave_signals_alone(worker: int) -> None:
    """Ignore what a scheduler sends to the whole group: the training process handles it."""
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(LEAVE, lambda number, frame: os._exit(0))


def _end_workers() -> None:
    """End the workers that still read ahead: they ignore SIGTERM, which Python would send."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker ends
    for worker in multiprocessing.active_children():
        if worker.daemon and worker.pid is not None:
            os.kill(worker.pid, LEAVE)


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

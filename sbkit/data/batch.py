"""Batches of utterances: from rows of prepared splits to tensors, and the loaders of a run.

Legend: B utterances, S samples, L tokens.
"""

import atexit
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, islice
from multiprocessing.connection import Listener
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from sbkit.audio.augment import SpeedGroup
from sbkit.base.errors import FAILED
from sbkit.base.machine import SHARED_MEMORY, SHORTAGES
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds, seconds_to_samples
from sbkit.base.workers import START_ERRORS, note_refusal
from sbkit.bundle.side_inputs import LENGTHS_SUFFIX, make_side_inputs, stack_side_inputs
from sbkit.bundle.task import Labels, Task
from sbkit.config.keys import with_defaults
from sbkit.data.corpus import SettingValues
from sbkit.data.manifest import MIX_SOURCE, RESERVED_COLUMNS
from sbkit.data.mix import require_utterances, sources_of
from sbkit.data.sampler import EvalSampler, Example, RankSampler, TrainSampler
from sbkit.data.shard import Row, read_rows
from sbkit.data.splits import Splits, sample_counts, shard_numbers
from sbkit.data.store_cache import StoreCache
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import rank, world_size
from sbkit.text.decoder_tokenizer import DecoderTokenizer
from sbkit.text.tokenizer import SPACE, Tokenizer

LEAVE_SIGNAL = signal.SIGUSR2  # the only signal that ends a worker
BATCHES_AHEAD = 2  # per worker, torch's default
# Statistics of features are measured on a random sample of this size: in five languages, its mean
# differs from the mean of all clips by 0.6 % of a standard deviation.
MAX_MEASURED_CLIPS = 5000

logger = logging.getLogger(__name__)

Loader = DataLoader[Row]
Collate = Callable[[Sequence[Row]], "Batch"]


def user_columns(names: Sequence[str]) -> list[str]:
    """Return the columns of the corpus, such as `sentence` and `speaker`, without sbkit's own."""
    return [name for name in names if name == "sentence" or name not in RESERVED_COLUMNS]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded audio with its lengths; the subclasses of recipes add labels."""

    ON_DEVICE: ClassVar[tuple[str, ...]] = ("audio", "weights")  # all tensors except lengths

    ids: list[str]
    columns: Mapping[str, list[str]]  # `user_columns`, by name
    audio: Tensor  # (B, S) int16, zero past each length; it becomes float on the device
    audio_lengths: Tensor  # (B,) samples, on the CPU like all lengths
    weights: Tensor  # (B,) 1, or 0 for an utterance that only fills a rank's empty share
    sources: Tensor  # (B,) index of the training source in a `mix`, otherwise 0; on the CPU
    speed_groups: tuple[SpeedGroup, ...]  # in the order of the rows
    seconds: float  # of audio, without padding and without utterances of weight 0
    # Side inputs of the network by name: (B,), or (B, N, ...) with `NAME_lengths` on the CPU
    sides: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        """Move all tensors except lengths; the host does not wait if they are pinned."""
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Pin the tensors; DataLoader calls this if there is a GPU."""
        return self._with_each(torch.Tensor.pin_memory)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change all tensors except lengths."""
        tensors: dict[str, Any] = {name: change(getattr(self, name)) for name in self.ON_DEVICE}
        sides = {
            name: tensor if name.endswith(LENGTHS_SUFFIX) else change(tensor)
            for name, tensor in self.sides.items()
        }
        return replace(self, **tensors, sides=sides)

    def rows(self) -> list[Row]:
        """Return the columns of each utterance, as a task's `result` takes them."""
        columns = {**self.columns, "id": self.ids, "samples": self.audio_lengths.tolist()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class TextBatch(Batch):
    """Audio and its transcripts."""

    ON_DEVICE = (*Batch.ON_DEVICE, "tokens", "decoder_tokens")

    texts: list[str]  # normalized
    tokens: Tensor  # (B, L) ids, the blank past each length
    token_lengths: Tensor  # (B,)
    decoder_tokens: Tensor  # the same, unless an attention decoder has its own tokens
    decoder_token_lengths: Tensor

    def rows(self) -> list[Row]:
        pairs = zip(super().rows(), self.texts, strict=True)
        return [{**row, "text": text} for row, text in pairs]


# ---- from rows to batches


class UtteranceDataset(Dataset[Row]):
    """Read the rows of many examples at once, and join the rows of each example.

    listing: the file that lists damaged clips.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        listing: Path | None = None,
        store_cache: StoreCache | None = None,
    ) -> None:
        self.rows = rows
        self._listing = listing
        self._options = {"relocate": store_cache.cached} if store_cache else {}

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, planned: Sequence[Example | int]) -> list[Row]:
        """Read examples, or rows by their index, with one request; order them by speed."""
        examples = [item if isinstance(item, Example) else Example((item,), 0) for item in planned]
        examples.sort(key=lambda example: example.percent)
        indices = [index for example in examples for index in example.rows]
        rows = read_rows(self.rows, indices, len(indices), self._listing, **self._options)
        return [_join(list(islice(rows, len(example.rows))), example) for example in examples]

    def __len__(self) -> int:
        return len(self.rows)


def _join(rows: Sequence[Row], example: Example) -> Row:
    """Concatenate the rows of an example; different values of a column are joined by "+"."""
    columns = {
        name: "+".join(dict.fromkeys(row[name] or "" for row in rows))
        for name in user_columns([*rows[0]])
    }
    return columns | {
        "id": "+".join(row["id"] for row in rows),
        "text": " ".join(row["text"] for row in rows),
        "audio": np.concatenate([row["audio"] for row in rows]),
        "samples": sum(row["samples"] for row in rows),
        "percent": example.percent,
        "weight": min(example.weight, *(row.get("weight", 1) for row in rows)),
        MIX_SOURCE: rows[0].get(MIX_SOURCE, 0),  # joined rows have the same source
    }


def collate_audio(rows: Sequence[Row], sample_rate: int) -> dict[str, Any]:
    """Return the fields of a `Batch`, for a collate function that adds its labels."""
    audio = [torch.from_numpy(row["audio"]) for row in rows]
    num_samples = sum(row["samples"] * row["weight"] for row in rows)
    return {
        "ids": [row["id"] for row in rows],
        "columns": {name: [row[name] for row in rows] for name in user_columns([*rows[0]])},
        "audio": pad_sequence(audio, batch_first=True),
        "audio_lengths": torch.tensor([len(clip) for clip in audio]),
        "weights": torch.tensor([row["weight"] for row in rows]),
        "sources": torch.tensor([row.get(MIX_SOURCE, 0) for row in rows]),
        "speed_groups": _speed_groups(
            [row["percent"] for row in rows], [row["samples"] for row in rows]
        ),
        "seconds": samples_to_seconds(num_samples, sample_rate),
    }


class TextCollate:
    """Pad utterances to a batch, and encode their texts.

    In a language without spaces, the spaces between joined rows are dropped: they have no token.

    decoder_tokenizer: for an attention decoder with its own tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample_rate: int = SAMPLE_RATE,
        decoder_tokenizer: DecoderTokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sample_rate = sample_rate
        self._decoder_tokenizer = decoder_tokenizer
        self._separator = " " if any(SPACE in piece for piece in tokenizer.pieces()) else ""

    def __call__(self, rows: Sequence[Row]) -> TextBatch:
        """Make one batch; ids that no loss accepts are refused here, on the CPU."""
        tokens = [self._encode(row) for row in rows]
        decoder_tokenizer = self._decoder_tokenizer
        padded, lengths = self._pad(tokens)
        decoder_padded, decoder_lengths = padded, lengths
        if decoder_tokenizer is not None:
            decoder_tokens = [decoder_tokenizer.encode(row["text"]) for row in rows]
            decoder_padded, decoder_lengths = self._pad(decoder_tokens)
        return TextBatch(
            **collate_audio(rows, self._sample_rate),
            texts=[row["text"] for row in rows],
            tokens=padded,
            token_lengths=lengths,
            decoder_tokens=decoder_padded,
            decoder_token_lengths=decoder_lengths,
        )

    def _encode(self, row: Row) -> list[int]:
        ids = self._tokenizer.encode(row["text"].replace(" ", self._separator))
        self._tokenizer.vocabulary.check_targets(ids, clip=row["id"])
        return ids

    def _pad(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the ids (B, L), the blank past each length, and the lengths (B,)."""
        tokens = [torch.tensor(ids, dtype=torch.int64) for ids in texts]
        blank = self._tokenizer.vocabulary.blank
        padded = pad_sequence(tokens, batch_first=True, padding_value=blank)
        return padded, torch.tensor([*map(len, texts)])


@dataclass(frozen=True)
class CollateWithSides:
    """Collate rows with the side inputs of a task.

    collate: makes a `Batch` of rows.
    """

    collate: Collate
    task: Task
    labels: Labels
    sample_rate: int

    def __call__(self, rows: Sequence[Row]) -> Batch:
        make = partial(make_side_inputs, self.task, self.labels, sample_rate=self.sample_rate)
        arrays = stack_side_inputs([*map(make, rows)])
        sides = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return replace(self.collate(rows), sides=sides)


def _speed_groups(percents: Sequence[int], samples: Sequence[int]) -> tuple[SpeedGroup, ...]:
    """Group consecutive utterances of equal speed; samples are counted at natural speed."""
    groups = []
    for percent, run in groupby(zip(percents, samples, strict=True), key=lambda pair: pair[0]):
        lengths = [length for _, length in run]
        groups.append(SpeedGroup(percent, len(lengths), max(lengths)))
    return tuple(groups)


# ---- loaders


@dataclass(frozen=True)
class Loaders:
    """The batches of every split."""

    # This rank's share of the global batches of the epoch: a Loader, or a LoopedLoader of
    # SpeechBrain around batches that have no end
    train: Any
    valid: Mapping[str, Loader]  # by split
    test: Mapping[str, Loader]  # by split
    for_statistics: Loader  # the training set in order, or a random sample of it
    splits: Splits


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader; None if it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def make_loaders(
    splits: Splits, settings: SettingValues, *, collate: Collate, placement: Placement
) -> Loaders:
    """Plan the batches of every split.

    collate: makes a `Batch` of rows; it calls `collate_audio` and adds the labels of the recipe.
    """
    ranks = {"rank": rank(), "world_size": world_size()}
    sample_rate = settings["sample_rate"]
    sources = sources_of(splits)
    require_utterances(sources, splits)
    # Of data that `sbkit prepare --out` has not written, neither key is read: it has no effect.
    settings = with_defaults(settings)
    shards = shard_numbers(splits.train)
    shuffle_shards = settings["shuffle_shards"] if shards.any() else 1
    is_stored = any(shard_numbers(split).any() for split in splits.named().values())
    folder = settings["store_cache"] if is_stored else None
    plan = TrainSampler(
        samples=sample_counts(splits.train),
        batch_seconds=settings["batch_seconds"],
        seed=settings["seed"],
        concat_prob=settings["concat_prob"],
        speeds=settings["speeds"],
        shards=shards,
        shuffle_shards=shuffle_shards,
        sources=sources,
        sample_rate=sample_rate,
    )
    store_cache = StoreCache(folder) if folder else None
    train = RankSampler(plan, accumulation=settings["grad_accumulation_factor"], **ranks)
    if store_cache and os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
        train.on_epoch = partial(store_cache.fetch_ahead, splits.train)
    load = partial(
        make_loader,
        collate=collate,
        store_cache=store_cache,
        num_workers=_workers_with_room(settings),
        pin_memory=placement.device.type == "cuda",
    )

    def in_order(split: datasets.Dataset, listing: Path | None = None) -> Loader:
        options = {"batch_seconds": settings["eval_batch_seconds"], "sample_rate": sample_rate}
        sampler = EvalSampler(samples=sample_counts(split), **options, **ranks)
        return load(split, sampler=sampler, listing=listing)

    measured = splits.train
    if len(measured) > MAX_MEASURED_CLIPS:  # draw one clip from each of as many equal parts
        edges = np.arange(MAX_MEASURED_CLIPS + 1) * len(measured) // MAX_MEASURED_CLIPS
        rows = np.random.default_rng(settings["seed"]).integers(edges[:-1], edges[1:])
        measured = measured.select(rows)
    listing = Path(settings["output_folder"], "left_out.tsv")
    return Loaders(
        train=load(splits.train, sampler=train, listing=listing),
        valid={name: in_order(split) for name, split in splits.valid.items()},
        test={name: in_order(split) for name, split in splits.test.items()},
        for_statistics=in_order(measured, listing),
        splits=splits,
    )


def make_loader(
    rows: datasets.Dataset,
    *,
    sampler: RankSampler | EvalSampler,
    collate: Collate,
    num_workers: int,
    pin_memory: bool,
    listing: Path | None = None,
    store_cache: StoreCache | None = None,
) -> Loader:
    """Load the sampler's micro-batches in its order."""
    if num_workers > 0:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
        # The user has chosen `num_workers`; torch would comment on it in every epoch.
        warnings.filterwarnings("ignore", "This DataLoader will create")
    return _WorkerLoader(
        UtteranceDataset(rows, listing, store_cache),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=begin_worker,
        pin_memory=pin_memory,
    )


class _WatchedSampler:
    """Keep the error of a sampler: nothing that was refused to workers has caused it."""

    error: Exception | None = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._sampler
        except Exception as error:
            self.error = error
            raise

    def __len__(self) -> int:
        return len(self._sampler)


class _WorkerLoader(DataLoader[Row]):
    """A loader that reads in this process if its workers cannot be started."""

    @cached_property
    def _index_sampler(self) -> _WatchedSampler:
        return _WatchedSampler(self.batch_sampler)

    def __iter__(self) -> Any:
        if self.num_workers > 0:
            children = {*multiprocessing.active_children()}
            try:
                multiprocessing.Event()  # torch's cleanup fails if it lacks semaphores
                Listener().close()  # a socket as each worker has, with a path below TMPDIR
                return super().__iter__()
            except START_ERRORS as error:
                if error is self._index_sampler.error:
                    raise
                note_refusal("reading batches without workers", error)
                self.num_workers = 0
                _end_children({*multiprocessing.active_children()} - children)
        return super().__iter__()


def begin_worker(worker: int) -> None:
    """Prepare a worker: it ends if it cannot pass on a batch, and ignores what stops the run."""
    # Otherwise Python would drop the batch, and the run would wait for it forever.
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    for ignored in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(LEAVE_SIGNAL, lambda number, frame: os._exit(0))


def _end_worker(error: Exception, batch: object) -> NoReturn:
    print(f"A worker cannot pass on a batch ({error}). {SHORTAGES}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def _end_workers() -> None:
    """End workers that still read ahead, because they ignore the SIGTERM that Python sends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker ends
    _end_children(multiprocessing.active_children())


def _end_children(children: Iterable[BaseProcess]) -> None:
    for worker in children:
        if worker.daemon and worker.pid is not None:
            os.kill(worker.pid, LEAVE_SIGNAL)


def _workers_with_room(settings: SettingValues) -> int:
    """Return the number of workers; 0, with a note, if shared memory cannot hold their batches."""
    num_workers: int = settings["num_workers"]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    train_seconds = settings["batch_seconds"] / world_size() / settings["grad_accumulation_factor"]
    seconds = max(train_seconds, settings["eval_batch_seconds"])
    batch_bytes = seconds_to_samples(seconds, settings["sample_rate"]) * np.dtype(np.int16).itemsize
    needed = BATCHES_AHEAD * num_workers * processes * batch_bytes
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else needed
    if free >= needed:
        return num_workers
    logger.warning(
        f"note: reading batches without workers: {num_workers} workers need {needed / 1e6:.0f} MB "
        f"of shared memory, but only {free / 1e6:.0f} MB are free. Lower `num_workers`, or start "
        "Docker with --shm-size."
    )
    return 0

"""From rows of a store to tensors.

Legend: B utterances, S samples, L tokens.
"""

import atexit
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby, islice
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from sbkit.audio.augment import SpeedGroup
from sbkit.base.units import samples_to_seconds
from sbkit.data.sampler import EvalSampler, Example, TrainSampler
from sbkit.text.tokenizer import Tokenizer

LEAVE = signal.SIGUSR2  # what a worker still answers to


@dataclass(frozen=True)
class Batch:
    """Utterances side by side, with absolute lengths.

    Attributes:
        ids, texts: the clips' ids and normalized transcripts.
        audio: (B, S) int16, zero past each length; it becomes float on the device.
        samples: (B,) lengths of the audio, on the CPU like all lengths.
        tokens: (B, L) label ids, the blank past each length.
        token_lengths: (B,) lengths of the labels.
        weights: (B,) 1, or 0 for an utterance that only fills a rank's empty share.
        speed_groups: who is to be played at which speed, in the order of the rows.
        seconds: audio in the batch, without padding and what has no weight.
    """

    ids: list[str]
    texts: list[str]
    audio: Tensor
    samples: Tensor
    tokens: Tensor
    token_lengths: Tensor
    weights: Tensor
    speed_groups: tuple[SpeedGroup, ...]
    seconds: float

    def to(self, device: torch.device) -> "Batch":
        """Move the tensors but for the lengths; the host does not wait when they are pinned."""
        names = ("audio", "tokens", "weights")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)

    def pin_memory(self) -> "Batch":
        """Pin the tensors; DataLoader calls this when there is a GPU."""
        names = ("audio", "tokens", "weights")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

    def to_plain(self) -> dict[str, Any]:
        """Give lists and tensors, which `torch.load(weights_only=True)` reads back."""
        return vars(self) | {"speed_groups": [astuple(group) for group in self.speed_groups]}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "Batch":
        """Take what `to_plain` gave."""
        return Batch(
            **{
                **plain,
                "speed_groups": tuple(SpeedGroup(*group) for group in plain["speed_groups"]),
            }
        )

    def select(self, row: int) -> "Batch":
        """Give one utterance alone, without the padding of the others."""
        one = slice(row, row + 1)
        samples, count = int(self.samples[row]), int(self.token_lengths[row])
        percent = [group.percent for group in self.speed_groups for _ in range(group.utterances)][
            row
        ]
        return Batch(
            ids=self.ids[one],
            texts=self.texts[one],
            audio=self.audio[one, :samples],
            samples=self.samples[one],
            tokens=self.tokens[one, :count],
            token_lengths=self.token_lengths[one],
            weights=self.weights[one],
            speed_groups=(SpeedGroup(percent, utterances=1, longest=samples),),
            seconds=samples_to_seconds(samples * int(self.weights[row])),
        )

    def __len__(self) -> int:
        """Count the utterances."""
        return len(self.ids)


class UtteranceDataset(Dataset[dict[str, Any]]):
    """Read the rows of many examples at once, and join those of each."""

    def __init__(self, store: datasets.Dataset) -> None:
        self._store = store

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read one row."""
        return self.__getitems__([Example((row,), self._store[row]["samples"])])[0]

    def __getitems__(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Read the examples of a batch with one look-up, in the order of their speeds."""
        examples = sorted(examples, key=lambda each: each.percent)
        columns = self._store[[row for each in examples for row in each.rows]]
        names = list(columns)
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [_join(list(islice(rows, len(each.rows))), each) for each in examples]

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._store)


def _join(rows: Sequence[dict[str, Any]], example: Example) -> dict[str, Any]:
    """Put rows one after the other."""
    return {
        "id": "+".join(row["id"] for row in rows),
        "text": " ".join(row["text"] for row in rows),
        "audio": b"".join(row["audio"] for row in rows),
        "samples": sum(row["samples"] for row in rows),
        "percent": example.percent,
        "weight": example.weight,
    }


class Collate:
    """Put utterances side by side and turn their text into ids that the losses can take."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Make one batch; an id that no loss may see is refused here, on the CPU."""
        audio = [torch.from_numpy(np.frombuffer(row["audio"], "<i2").copy()) for row in rows]
        tokens = [torch.tensor(self._encode(row), dtype=torch.int64) for row in rows]
        blank = self._tokenizer.vocabulary.blank
        return Batch(
            ids=[row["id"] for row in rows],
            texts=[row["text"] for row in rows],
            audio=pad_sequence(audio, batch_first=True),
            samples=torch.tensor([len(clip) for clip in audio]),
            tokens=pad_sequence(tokens, batch_first=True, padding_value=blank),
            token_lengths=torch.tensor([len(labels) for labels in tokens]),
            weights=torch.tensor([row["weight"] for row in rows]),
            speed_groups=tuple(_speed_groups(rows)),
            seconds=samples_to_seconds(sum(row["samples"] * row["weight"] for row in rows)),
        )

    def _encode(self, row: dict[str, Any]) -> list[int]:
        ids = self._tokenizer.encode(row["text"])
        self._tokenizer.vocabulary.check_targets(ids, of=row["id"])
        return ids


def _speed_groups(rows: Sequence[dict[str, Any]]) -> Iterator[SpeedGroup]:
    for percent, run in groupby(rows, key=lambda row: row["percent"]):
        lengths = [row["samples"] for row in run]
        yield SpeedGroup(percent=percent, utterances=len(lengths), longest=max(lengths))


def make_loader(
    store: datasets.Dataset,
    *,
    sampler: TrainSampler | EvalSampler,
    tokenizer: Tokenizer,
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
        collate_fn=Collate(tokenizer),
        num_workers=num_workers,
        worker_init_fn=_leave_signals_alone,
        pin_memory=pin_memory,
    )


def _leave_signals_alone(worker: int) -> None:
    """Let the training process answer what a scheduler sends to all of its group."""
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(LEAVE, lambda number, frame: os._exit(0))


def _end_workers() -> None:
    """End what still reads ahead: Python would ask by SIGTERM, and wait for ever."""
    for worker in multiprocessing.active_children():
        if worker.daemon and worker.pid is not None:
            os.kill(worker.pid, LEAVE)

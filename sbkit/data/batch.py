"""From rows of a store to tensors.

Legend: B utterances, S samples, L tokens.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from sbkit.data.sampler import EvalSampler, TrainSampler
from sbkit.tensors.tokenizer import Tokenizer
from sbkit.values.units import samples_to_seconds, seconds_to_samples

LONGEST_JOINED = seconds_to_samples(15.0)  # attention grows with the square of the length


@dataclass(frozen=True)
class Batch:
    """Utterances side by side, with absolute lengths.

    Attributes:
        ids, texts: the clips' ids and normalized transcripts.
        audio: (B, S) int16, zero past each length; it becomes float on the device.
        samples: (B,) lengths of the audio.
        tokens: (B, L) label ids, the blank past each length.
        token_counts: (B,) lengths of the labels.
        weights: (B,) 1, or 0 for a row that only fills a rank's empty share.
        seconds: audio in the batch, without padding and rows of weight 0.
    """

    ids: list[str]
    texts: list[str]
    audio: Tensor
    samples: Tensor
    tokens: Tensor
    token_counts: Tensor
    weights: Tensor
    seconds: float

    def to(self, device: torch.device) -> "Batch":
        """Move the tensors; the host does not wait when they are pinned."""
        names = ("audio", "samples", "tokens", "token_counts", "weights")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)

    def pin_memory(self) -> "Batch":
        """Pin the tensors; DataLoader calls this when there is a GPU."""
        names = ("audio", "samples", "tokens", "token_counts", "weights")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

    def __len__(self) -> int:
        """Count the utterances."""
        return len(self.ids)


class Rows(Dataset[dict[str, Any]]):
    """Read many rows of a store at once; a row ~n is row n without weight."""

    def __init__(self, store: datasets.Dataset) -> None:
        self._store = store

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read one row."""
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows of a batch with one look-up."""
        columns = self._store[[row if row >= 0 else ~row for row in rows]]
        names = list(columns)
        return [
            dict(zip(names, values, strict=True), weight=int(row >= 0))
            for row, *values in zip(rows, *columns.values(), strict=True)
        ]

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._store)


class Collate:
    """Put rows side by side and turn their text into ids that the losses can take.

    In ``join_share`` of the batches rows are joined to longer ones, which shows the model words in
    a wider company than the few sentences of a small corpus.
    """

    def __init__(self, tokenizer: Tokenizer, *, join_share: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._join_share = join_share

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Make one batch; an id that no loss may see is refused here, on the CPU."""
        rows = join_runs(rows, share=self._join_share)
        audio = [torch.from_numpy(np.frombuffer(row["audio"], "<i2").copy()) for row in rows]
        tokens = [torch.tensor(self._encode(row), dtype=torch.int64) for row in rows]
        blank = self._tokenizer.labels.blank
        return Batch(
            ids=[row["id"] for row in rows],
            texts=[row["text"] for row in rows],
            audio=pad_sequence(audio, batch_first=True),
            samples=torch.tensor([len(clip) for clip in audio]),
            tokens=pad_sequence(tokens, batch_first=True, padding_value=blank),
            token_counts=torch.tensor([len(labels) for labels in tokens]),
            weights=torch.tensor([row["weight"] for row in rows]),
            seconds=samples_to_seconds(
                sum(len(clip) * row["weight"] for clip, row in zip(audio, rows, strict=True))
            ),
        )

    def _encode(self, row: dict[str, Any]) -> list[int]:
        ids = self._tokenizer.encode(row["text"])
        self._tokenizer.labels.check_targets(ids, of=row["id"])
        return ids


def join_runs(rows: Sequence[dict[str, Any]], *, share: float) -> Sequence[dict[str, Any]]:
    """Join neighbours in runs of one size, or leave the batch alone: a draw that its ids decide.

    So a resumed run joins the same, in whichever process. The rows of a micro-batch are alike in
    length, so runs need about the padding of before (where the last run is not full, one more).
    """
    random = Random(zlib.crc32(" ".join(row["id"] for row in rows).encode()))
    most = min(len(rows), LONGEST_JOINED // max(1, *(row["samples"] for row in rows)))
    if random.random() >= share or most < 2:
        return rows
    size = random.randint(2, most)
    return [_joined(rows[first : first + size]) for first in range(0, len(rows), size)]


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Play one row after the other."""
    return {
        "id": "+".join(row["id"] for row in rows),
        "text": " ".join(row["text"] for row in rows),
        "audio": b"".join(row["audio"] for row in rows),
        "samples": sum(row["samples"] for row in rows),
        "weight": rows[0]["weight"],
    }


def make_loader(
    store: datasets.Dataset,
    *,
    sampler: TrainSampler | EvalSampler,
    tokenizer: Tokenizer,
    num_workers: int,
    pin_memory: bool,
    join_share: float = 0.0,
) -> DataLoader[dict[str, Any]]:
    """Load the sampler's micro-batches in its order."""
    return DataLoader(
        Rows(store),
        batch_sampler=sampler,
        collate_fn=Collate(tokenizer, join_share=join_share),
        num_workers=num_workers,
        pin_memory=pin_memory,
    )

"""What the losses need to know of every transcript of a split, read once and without its audio."""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain
from typing import Protocol, runtime_checkable

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.base.units import at_speed
from sbkit.data.splits import count_characters, take_columns
from sbkit.decoding.alignment import frames_needed
from sbkit.models.subsampling import Subsampling
from sbkit.text.vocabulary import Vocabulary

ROWS_AT_ONCE = 10_000

Counts = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]


@runtime_checkable
class TextLabels(Hashable, Protocol):
    """What turns the text of an utterance into ids of a vocabulary, as a tokenizer does."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """Turn normalized text into ids."""


@dataclass(frozen=True)
class Transcripts:
    """Columns with an entry per row of a split.

    samples: of audio; characters, labels: of the text and its labels; frames_needed: by CTC, a
    frame for each label, and one more between two that are equal; refused: holds a label that no
    loss may see; unknown: holds the unknown label. alphabet: all characters of the split.
    """

    samples: Counts
    characters: Counts
    labels: Counts
    frames_needed: Counts
    refused: Marks
    unknown: Marks
    alphabet: frozenset[str]

    def lacking(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Find the rows with too few frames, at a speed, for any alignment of CTC."""
        return np.flatnonzero(self.frames(subsampling, percent) < self.frames_needed)

    def frames(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Count the frames that the front-end leaves at a speed."""
        return subsampling.count(at_speed(self.samples, percent))


@lru_cache(maxsize=32)  # checks, and then the loaders, ask for those of every split
def read_transcripts(split: datasets.Dataset, tokenizer: TextLabels) -> Transcripts:
    """Tokenize all texts of a split; a million of 50 characters take about ten seconds."""
    columns = take_columns(split, "samples", "text")
    starts = range(0, max(1, len(split)), ROWS_AT_ONCE)
    return _join([_read(columns.slice(start, ROWS_AT_ONCE), tokenizer) for start in starts])


def _read(table: pa.Table, tokenizer: TextLabels) -> Transcripts:
    texts: list[str] = table["text"].to_pylist()
    encoded = list(map(tokenizer.encode, texts))
    counts = _lengths(encoded)
    labels = np.fromiter(chain.from_iterable(encoded), np.int64, counts.sum())
    rows = np.repeat(np.arange(len(texts)), counts)

    def count(marked: Marks, of: Counts) -> Counts:
        return np.bincount(of[marked], minlength=len(texts))

    space = tokenizer.vocabulary
    refused = (labels < 0) | (labels >= space.size) | (labels == space.blank)
    return Transcripts(
        samples=table["samples"].to_numpy(),
        characters=_lengths(texts),
        labels=counts,
        frames_needed=frames_needed(labels, counts),
        refused=count(refused, rows) > 0,
        unknown=count(labels == space.unk, rows) > 0,
        alphabet=frozenset(count_characters([texts])),
    )


def _lengths(values: list[str] | list[list[int]]) -> Counts:
    return np.fromiter(map(len, values), np.int64, len(values))


def _join(parts: list[Transcripts]) -> Transcripts:
    names = [field.name for field in fields(Transcripts) if field.name != "alphabet"]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Transcripts(**columns, alphabet=frozenset().union(*(part.alphabet for part in parts)))

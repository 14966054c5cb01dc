"""Lengths and labels of all transcripts of a split, read once and without its audio."""

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
from sbkit.data.splits import take_columns
from sbkit.decoding.alignment import frames_needed
from sbkit.models.subsampling import Subsampling
from sbkit.text.vocabulary import Vocabulary

TOKENIZED_ROWS = 10_000

Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@runtime_checkable
class TextLabels(Hashable, Protocol):
    """Turns the text of an utterance into ids of a vocabulary, as a tokenizer does."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """Turn normalized text into ids."""


@dataclass(frozen=True)
class Transcripts:
    """Columns with an entry for each row of a split.

    Attributes:
        samples: of the audio.
        characters, labels: of the text, as numbers.
        frames_needed: a frame for each label, and a blank between two that are equal.
        refused: contains an id that no loss accepts.
        unknown: contains the unknown label.
    """

    samples: Counts
    characters: Counts
    labels: Counts
    frames_needed: Counts
    refused: Mask
    unknown: Mask

    def too_short(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Return the rows with too few frames, at a speed in percent, for any alignment of CTC."""
        return np.flatnonzero(self.frames(subsampling, percent) < self.frames_needed)

    def frames(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Count the frames after the front-end, at a speed in percent."""
        return subsampling.count(at_speed(self.samples, percent))


@lru_cache(maxsize=32)  # the checks and then the loaders read every split
def read_transcripts(split: datasets.Dataset, tokenizer: TextLabels) -> Transcripts:
    """Tokenize all texts of a split; a million of 50 characters take about ten seconds."""
    columns = take_columns(split, "samples", "text")
    starts = range(0, max(1, len(split)), TOKENIZED_ROWS)
    batches = [_tokenize(columns.slice(start, TOKENIZED_ROWS), tokenizer) for start in starts]
    return Transcripts(
        *(
            np.concatenate([getattr(batch, field.name) for batch in batches])
            for field in fields(Transcripts)
        )
    )


def _tokenize(table: pa.Table, tokenizer: TextLabels) -> Transcripts:
    texts: list[str] = table["text"].to_pylist()
    encoded = [tokenizer.encode(text) for text in texts]
    counts = np.fromiter(map(len, encoded), np.int64, len(texts))
    labels = np.fromiter(chain.from_iterable(encoded), np.int64, counts.sum())
    rows = np.repeat(np.arange(len(texts)), counts)
    vocabulary = tokenizer.vocabulary
    is_refused = (labels < 0) | (labels >= vocabulary.size) | (labels == vocabulary.blank)

    def rows_with(mask: Mask) -> Mask:
        return np.bincount(rows[mask], minlength=len(texts)) > 0

    return Transcripts(
        samples=table["samples"].to_numpy(),
        characters=np.fromiter(map(len, texts), np.int64, len(texts)),
        labels=counts,
        frames_needed=frames_needed(labels, counts),
        refused=rows_with(is_refused),
        unknown=rows_with(labels == vocabulary.unk),
    )

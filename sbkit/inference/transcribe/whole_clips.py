"""Whole utterances of prepared data, in batches of like length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from sbkit.audio.io import Samples
from sbkit.data.batches.batch import UtteranceDataset
from sbkit.data.batches.sampler import EvalSampler
from sbkit.data.corpora.columns import sample_counts

BATCH_SECONDS = 120.0  # of padded audio


@dataclass(frozen=True)
class WholeClips:
    """Some utterances: their places in the data, all that is known of them, and (S,) of int16."""

    places: tuple[int, ...]
    rows: Sequence[Mapping[str, Any]]
    audio: list[Samples]


def read_whole_clips(rows: datasets.Dataset, sample_rate: int) -> Iterator[WholeClips]:
    """Yield every utterance, the shortest first."""
    reader = UtteranceDataset(rows)
    batches = EvalSampler(
        samples=sample_counts(rows), batch_seconds=BATCH_SECONDS, sample_rate=sample_rate
    )
    for batch in batches:
        chosen = reader.__getitems__(batch)
        audio = [row["audio"] for row in chosen]
        yield WholeClips(tuple(row for each in batch for row in each.rows), chosen, audio)

"""Whole utterances of prepared data, and the test sets of a run.

Formats are compared on them, and `sbkit score` scores them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.config.hparams import read_knobs
from sbkit.data.batches.batch import UtteranceDataset
from sbkit.data.batches.sampler import EvalSampler
from sbkit.data.corpora.columns import sample_counts
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.utterances import hash_pairs
from sbkit.train.recipe import load_recipe

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


@dataclass(frozen=True)
class HeldOut:
    """The test sets by name, as the run was tested on them."""

    sets: Mapping[str, datasets.Dataset]
    sample_rate: int

    def batches(self) -> Iterator[WholeClips]:
        """Yield all utterances of all sets."""
        for rows in self.sets.values():
            yield from read_whole_clips(rows, self.sample_rate)


def find_held_out(run: Path) -> HeldOut:
    """Prepare the test sets that a run's YAML names, as training does.

    Raises SbkitError where the data is not there, or is not what the run was tested on.
    """
    knobs = read_knobs(run / RESOLVED, {})
    sets = load_recipe(knobs, run / RESOLVED).prepare_splits(knobs).test
    if not sets:
        raise SbkitError(
            f"A run must have test sets to be scored or compared on, but {run} has none. Name data "
            f"of yours: sbkit score {run} test.csv"
        )
    summary = run / SUMMARY
    tested = (
        json.loads(summary.read_text(encoding="utf-8")).get("test", {}) if summary.is_file() else {}
    )
    for name, rows in sets.items():
        expected = tested.get(name, {}).get("references")
        pairs = zip(rows["id"][:], rows["text"][:], strict=True)
        if expected is not None and expected != hash_pairs(pairs):
            raise SbkitError(
                f"The test set `{name}` must be the one that the run was tested on, but its ids or "
                "transcripts changed since. Restore it."
            )
    return HeldOut(sets, int(knobs["sample_rate"]))

"""Whole utterances of prepared data, and the test sets of a run.

Formats are compared on them, and `sbkit score` scores them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.run_config import RESOLVED
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import UtteranceDataset
from sbkit.data.sampler import EvalSampler
from sbkit.data.splits import sample_counts
from sbkit.train.recipe import load_recipe

BATCH_SECONDS = 120.0  # of padded audio


def read_whole_clips(
    rows: datasets.Dataset, sample_rate: int
) -> Iterator[dict[int, Mapping[str, Any]]]:
    """Yield batches of utterances, the shortest first: by their places, with `audio` (S,) int16."""
    reader = UtteranceDataset(rows)
    batches = EvalSampler(
        samples=sample_counts(rows), batch_seconds=BATCH_SECONDS, sample_rate=sample_rate
    )
    for batch in batches:
        places = (row for each in batch for row in each.rows)
        yield dict(zip(places, reader.__getitems__(batch), strict=True))


def find_held_out(run: Path) -> Mapping[str, datasets.Dataset]:
    """Prepare the test sets that a run's YAML names, as training does.

    Raises SbkitError where the data is not there.
    """
    knobs = read_knobs(run / RESOLVED, {})
    sets = load_recipe(knobs, run / RESOLVED).prepare_splits(knobs).test
    if not sets:
        raise SbkitError(
            f"A run must have test sets to be scored or compared on, but {run} has none. Name data "
            f"of yours: sbkit score {run} test.csv"
        )
    return sets

"""The test sets of a run, and batches of whole utterances."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import ConfigError, DataError
from sbkit.checkpoint.run_config import RESOLVED_YAML
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import UtteranceDataset
from sbkit.data.sampler import EvalSampler
from sbkit.data.splits import sample_counts
from sbkit.train.recipe import load_recipe

BATCH_SECONDS = 120.0  # of padded audio


def read_whole_clips(
    rows: datasets.Dataset, sample_rate: int
) -> Iterator[dict[int, Mapping[str, Any]]]:
    """Yield batches of utterances, the shortest first, by row index, with `audio` (S,) int16."""
    reader = UtteranceDataset(rows)
    batches = EvalSampler(
        samples=sample_counts(rows), batch_seconds=BATCH_SECONDS, sample_rate=sample_rate
    )
    for batch in batches:
        indices = (row for plan in batch for row in plan.rows)
        yield dict(zip(indices, reader.__getitems__(batch), strict=True))


def prepare_test_sets(run: Path, split: str | None = None) -> Mapping[str, datasets.Dataset]:
    """Prepare the test sets of a run, or one split such as `train`, as training does.

    Raises:
        SbkitError: the data is missing, or the run has no test sets, or no such split.
    """
    knobs = read_knobs(run / RESOLVED_YAML, {})
    splits = load_recipe(knobs, run / RESOLVED_YAML).prepare_splits(knobs)
    if split is not None:
        named = splits.named()
        if split not in named:
            raise ConfigError(f"{run} has no split `{split}`. It has {', '.join(named)}.")
        return {split: named[split]}
    if not splits.test:
        raise DataError(
            f"{run} has no test sets to score or compare models on. Name data of your own: sbkit "
            f"score {run} test.csv"
        )
    return splits.test

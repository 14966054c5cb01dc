"""The mix of training sources: the share of each in the seconds of an epoch.

A source is one of the training splits, such as a key of `manifest`. An epoch has every utterance of
a source without a share once. A source with a share contributes that share of the seconds. If all
sources have a share, an epoch is as long as without a mix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbkit.base.arrays import Counts
from sbkit.base.errors import ConfigError, DataError, concerning
from sbkit.data.manifest import MIX_SOURCE
from sbkit.data.splits import Splits, sample_counts, take_columns

SUM_TOLERANCE = 1e-6  # of shares, which are rounded numbers

Shares = Mapping[str, float | None]  # by source; None: every utterance once per epoch


@dataclass(frozen=True, eq=False)
class MixSource:
    """A training source of a mix."""

    name: str
    rows: Counts  # the indices of its rows in the training set
    samples: int  # in all its rows
    epoch_samples: int  # in its share of an epoch, on average


@concerning("mix")
def parse_mix_shares(mix: Mapping[str, Any], names: Sequence[str]) -> Shares:
    """Return the share of each training source in the key `mix`; {} without a mix.

    >>> parse_mix_shares({"train-synthetic": 0.5}, ["train", "train-synthetic"])
    {'train': None, 'train-synthetic': 0.5}
    """
    share_of = {str(name): share for name, share in mix.items()}
    for name in share_of:
        if name not in names:
            raise ConfigError(
                f"`mix` names {name!r}, but the training sources are {', '.join(names)}."
            )
    total = sum(share_of.values())
    unshared = [name for name in names if name not in share_of]
    if share_of and (total > 1 - SUM_TOLERANCE if unshared else abs(total - 1) > SUM_TOLERANCE):
        limit = f"less than 1, because an epoch also has {', '.join(unshared)}" if unshared else "1"
        raise ConfigError(f"The shares in `mix` must sum to {limit}, but sum to {total:g}.")
    return {name: share_of.get(name) for name in names} if share_of else {}


def sources_of(splits: Splits) -> list[MixSource]:
    """Return the training sources of a mix, in their order; [] without a mix."""
    if not splits.mix:
        return []
    source_of_row: Counts = take_columns(splits.train, MIX_SOURCE)[MIX_SOURCE].to_numpy()
    return make_sources(sample_counts(splits.train), source_of_row, splits.mix)


def make_sources(samples: Counts, source_of_row: Counts, shares: Shares) -> list[MixSource]:
    """Make the sources of a mix, from the length and the source of every row."""
    epoch_samples = float(samples.sum())
    if None in shares.values():
        has_no_share = np.array([share is None for share in shares.values()])[source_of_row]
        epoch_samples = samples[has_no_share].sum() / (1 - sum(filter(None, shares.values())))
    sources: list[MixSource] = []
    for index, (name, share) in enumerate(shares.items()):
        rows = np.flatnonzero(source_of_row == index)
        total = int(samples[rows].sum())
        share_samples = total if share is None else max(1, round(share * epoch_samples))
        sources.append(MixSource(name, rows, samples=total, epoch_samples=share_samples))
    return sources


@concerning("mix")
def require_utterances(sources: Sequence[MixSource], splits: Splits) -> None:
    """Raise DataError if a source has no audio."""
    for source in sources:
        if not source.samples:
            reasons = {row.reason for row in (*splits.excluded, *splits.out_of_range)}
            raise DataError(
                f"`mix` needs utterances of {source.name}, but all of them are left out of "
                f"training ({', '.join(sorted(reasons))})."
            )

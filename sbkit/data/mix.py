"""The mix of training sources: the share of each in the seconds of an epoch.

A source is one of the training splits, such as a key of `manifest`. An epoch has every utterance of
the sources without a share once, and of each other source as many seconds as its share asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbkit.base.arrays import Counts
from sbkit.base.errors import ConfigError, DataError
from sbkit.data.manifest import MIX_SOURCE
from sbkit.data.splits import Splits, sample_counts, take_columns

EXAMPLE = "Write mix: {train-synthetic: 0.5}."
SUM_TOLERANCE = 1e-6  # of shares, which are rounded numbers

Shares = Mapping[str, float | None]  # by source; None: every utterance once per epoch


@dataclass(frozen=True, eq=False)
class Source:
    """A training source of a mix."""

    name: str
    share: float | None  # as in `Shares`
    rows: Counts  # its indices in the training set
    samples: int  # of all its rows
    epoch_samples: int  # of its part of an epoch, on average


def read_shares(mix: object, names: Sequence[str]) -> Shares:
    """Return the share of each training source in the key `mix`; nothing without a mix.

    >>> read_shares({"train-synthetic": 0.5}, ["train", "train-synthetic"])
    {'train': None, 'train-synthetic': 0.5}

    Raises:
        ConfigError: `mix` names an unknown source, or its shares do not add up to an epoch.
    """
    if mix is None or mix == {}:
        return {}
    if not isinstance(mix, Mapping):
        raise ConfigError(
            "`mix` must map names of training sources to their shares of an epoch, but is "
            f"{mix!r}. {EXAMPLE}"
        )
    share_of = {str(name): share for name, share in mix.items()}
    for name, share in share_of.items():
        if name not in names:
            raise ConfigError(
                f"`mix` names {name!r}, which is not a training source of this run. Choose among: "
                f"{', '.join(names)}."
            )
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:
            raise ConfigError(
                f"`mix.{name}` must be a number above 0 and at most 1, but is {share!r}. To train "
                f"without {name}, take it out of `manifest` or `splits`."
            )
    _check_sum(sum(share_of.values()), [name for name in names if name not in share_of])
    return {name: share_of.get(name) for name in names}


def _check_sum(total: float, unnamed: Sequence[str]) -> None:
    if not unnamed and abs(total - 1) > SUM_TOLERANCE:
        raise ConfigError(
            f"`mix` names every training source, so its shares must sum to 1, but they sum to "
            f"{total:g}. Correct them, or leave out a source that an epoch is to have once."
        )
    if unnamed and total > 1 - SUM_TOLERANCE:
        raise ConfigError(
            f"The shares in `mix` must sum to less than 1, because {', '.join(unnamed)} has the "
            f"rest of an epoch, but they sum to {total:g}. Lower them."
        )


def sources_of(splits: Splits) -> list[Source]:
    """Return the training sources of a mix, in their order; none without a mix."""
    if not splits.mix:
        return []
    source_of_row: Counts = take_columns(splits.train, MIX_SOURCE)[MIX_SOURCE].to_numpy()
    return make_sources(sample_counts(splits.train), source_of_row, splits.mix)


def make_sources(samples: Counts, source_of_row: Counts, shares: Shares) -> list[Source]:
    """Make the sources of a mix, from the length and the source of every row."""
    rows = [np.flatnonzero(source_of_row == index) for index in range(len(shares))]
    totals = [int(samples[of_source].sum()) for of_source in rows]
    named = [share for share in shares.values() if share is not None]
    epoch_samples = float(sum(totals))  # as without a mix, if all sources have a share
    if len(named) < len(shares):
        pairs = zip(totals, shares.values(), strict=True)
        epoch_samples = sum(total for total, share in pairs if share is None) / (1 - sum(named))
    return [
        Source(
            name=name,
            share=share,
            rows=of_source,
            samples=total,
            epoch_samples=total if share is None else max(1, round(share * epoch_samples)),
        )
        for (name, share), of_source, total in zip(shares.items(), rows, totals, strict=True)
    ]


def samples_per_epoch(splits: Splits) -> int:
    """Count the samples of an epoch, on average."""
    sources = sources_of(splits)
    if not sources:
        return int(sample_counts(splits.train).sum())
    return sum(source.epoch_samples for source in sources)


def require_utterances(sources: Sequence[Source]) -> None:
    """Raise DataError if a source with a share, or all those without one, have no utterance."""
    for source in sources:
        if source.share is not None and not source.samples:
            raise DataError(
                f"`mix` gives {source.name} a share of {source.share:g}, but all of its utterances "
                "are left out of training. Correct its data, or take it out of `mix`."
            )
    unnamed = [source for source in sources if source.share is None]
    if unnamed and not any(source.samples for source in unnamed):
        raise DataError(
            f"`mix` leaves a part of an epoch to {', '.join(source.name for source in unnamed)}, "
            "but all of its utterances are left out of training. Correct its data, or the shares."
        )


def walk(
    samples: Counts, start: int, stop: int, *, total: int, order_of_pass: Callable[[int], Counts]
) -> Counts:
    """Return the rows that begin from sample ``start`` to before ``stop`` of an endless walk.

    Pass after pass, the walk visits every row of a source once, in the order that
    ``order_of_pass(pass number)`` returns.

    samples: of every row of the training set.
    total: samples of a pass.

    >>> samples = np.array([4, 4, 2])
    >>> walk(samples, 8, 18, total=10, order_of_pass=lambda number: np.array([0, 1, 2])).tolist()
    [2, 0, 1]
    """
    visited: list[Counts] = []
    for number in range(start // total, (stop - 1) // total + 1):
        order = order_of_pass(number)
        begins = number * total + np.cumsum(samples[order]) - samples[order]
        visited.append(order[(start <= begins) & (begins < stop)])
    return np.concatenate(visited)

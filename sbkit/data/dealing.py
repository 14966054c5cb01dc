"""Deal the speakers of a corpus to its splits, the same in every table and in later releases."""

import hashlib
from collections.abc import Mapping

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.tables import RELEASE_SPLITS

DEFAULT_SHARES = {"dev": 0.1, "test": 0.1}  # of the speakers, about; the others are for training


def check_shares(shares: object) -> dict[str, float]:
    """Check the value of the key ``split_shares``; raises ConfigError."""
    shares = DEFAULT_SHARES if shares is None else shares
    if (
        not isinstance(shares, Mapping)
        or not {*shares} <= {*RELEASE_SPLITS[1:]}
        or not all(type(share) in (int, float) and 0 < share < 1 for share in shares.values())
        or not 0 < sum(shares.values()) < 1
    ):
        raise ConfigError(
            "`split_shares` must map dev and test to shares of the speakers that together are "
            f"below 1, such as {DEFAULT_SHARES}, but is {shares!r}."
        )
    return dict(shares)


def deal_speakers(
    counts: Mapping[str, int], shares: Mapping[str, float], source: object, *, fill: bool = True
) -> dict[str, str]:
    """Return the split of each speaker, which follows from the speaker's name.

    Speakers with more rows than a split shall have are for training.

    counts: the number of rows of each speaker.
    source: of the rows, for an error.
    fill: whether each split must have a speaker, if need be the one with the fewest rows.

    Raises:
        DataError: there are fewer speakers than splits that must have one.
    """
    if fill and len(counts) <= len(shares):
        raise DataError(
            f"{source} has {len(counts)} of the {len(shares) + 1} speakers that it takes to choose "
            "splits. Write the splits into its column `split`."
        )
    total = sum(counts.values())
    split_of = dict.fromkeys(counts, RELEASE_SPLITS[0])
    start = 0.0
    for split, share in shares.items():
        chosen = [
            speaker
            for speaker, count in counts.items()
            if start <= _position(speaker) < start + share and count <= share * total
        ]
        if fill and not chosen:
            undealt = [speaker for speaker in counts if split_of[speaker] == RELEASE_SPLITS[0]]
            chosen = [min(undealt, key=lambda speaker: (counts[speaker], _position(speaker)))]
        split_of |= dict.fromkeys(chosen, split)
        start += share
    return split_of


def _position(speaker: str) -> float:
    """Return a number from 0 to 1 that follows from the name of a speaker and tells nothing."""
    digest = hashlib.sha256(speaker.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)

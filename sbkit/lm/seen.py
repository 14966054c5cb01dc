"""How many sentences of a test set a language model has learned from, by hashes of its sentences.

A hash has 8 bytes, and no sentence is kept. Of a large text, the smallest hashes are kept. Since
hashes are as good as random, these are a draw; the test sentences with hashes as small are one,
too, and the share that was seen is estimated from them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sbkit.base.arrays import Array

HASH_BYTES = 8
MAX_HASHES = 1_000_000
SEEN = "seen_by_language_model"  # in the figures of a test set


@dataclass(frozen=True)
class SeenSentences:
    """The hashes (N,) of the sentences that a language model was trained on.

    >>> seen = SeenSentences.of(["hold the line", "press one"])
    >>> describe_seen(seen.count(["press one", "press two"]))
    'The language model has seen 1 of 2 test sentences (50.0 %)'
    """

    hashes: Array

    def __post_init__(self) -> None:
        """Raise ValueError for an array that holds no hashes."""
        if self.hashes.dtype != np.uint64 or self.hashes.ndim != 1:
            raise ValueError("the hashes of its sentences are damaged")

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Self:
        """Hash normalized sentences, and keep at most MAX_HASHES."""
        return cls(np.unique(_hashes(sentences))[:MAX_HASHES])

    def count(self, sentences: Iterable[str]) -> dict[str, Any]:
        """Return how many normalized sentences of a test set are among these, as plain data."""
        hashes = _hashes(sentences)
        is_drawn = len(self.hashes) >= MAX_HASHES
        drawn = hashes[hashes <= self.hashes.max()] if is_drawn else hashes
        seen = int(np.isin(drawn, self.hashes).sum())
        return {"seen": seen, "of": len(drawn), "sentences": len(hashes), "is_estimate": is_drawn}


def _hashes(sentences: Iterable[str]) -> Array:
    digests = (
        hashlib.blake2b(sentence.encode(), digest_size=HASH_BYTES).digest()
        for sentence in sentences
        if sentence
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def describe_seen(figures: dict[str, Any]) -> str:
    """Write the counts of `SeenSentences.count` in one line."""
    share = f"{100 * figures['seen'] / max(figures['of'], 1):.1f} %"
    line = f"The language model has seen {figures['seen']} of {figures['of']} test sentences"
    if not figures["is_estimate"]:
        return f"{line} ({share})"
    return (
        f"{line} that can be compared, an estimate of {share} for all {figures['sentences']}: of "
        f"its text, {MAX_HASHES:,} sentences are drawn"
    )

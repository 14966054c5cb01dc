"""How many sentences of a test set a language model has learned from, by hashes of its sentences.

Of a large text, only the smallest hashes are kept. Hashes are as good as random, so these are a
random sample. Test sentences are sampled by the same limit, and their share is the estimate.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sbkit.base.arrays import Array

HASH_BYTES = 8
MAX_HASHES = 1_000_000
SEEN = "seen_by_language_model"  # in the figures of a test set: what `count_seen` returns


def hash_sentences(sentences: Iterable[str]) -> Array:
    """Return the hash of each normalized sentence: (N,) of uint64."""
    digests = (
        hashlib.blake2b(sentence.encode(), digest_size=HASH_BYTES).digest()
        for sentence in sentences
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def draw_hashes(sentences: Iterable[str]) -> Array:
    """Return the hashes of different sentences, at most MAX_HASHES, in increasing order."""
    return np.unique(hash_sentences(sentences))[:MAX_HASHES]


def count_seen(learned: Array, sentences: Iterable[str]) -> dict[str, Any]:
    """Count the normalized sentences of a test set that are among the ``learned`` hashes.

    >>> counts = count_seen(draw_hashes(["hold the line", "press one"]), ["press one", "press two"])
    >>> describe_seen(counts)
    'The language model has seen 1 of 2 test sentences (50.0 %)'
    """
    hashes = hash_sentences(filter(None, sentences))
    is_estimate = len(learned) >= MAX_HASHES
    drawn = hashes[hashes <= learned[-1]] if is_estimate else hashes
    seen = int(np.isin(drawn, learned).sum())
    return {"seen": seen, "of": len(drawn), "sentences": len(hashes), "is_estimate": is_estimate}


def describe_seen(counts: Mapping[str, Any]) -> str:
    """Write what `count_seen` returns in one line."""
    share = f"{100 * counts['seen'] / max(counts['of'], 1):.1f} %"
    line = f"The language model has seen {counts['seen']} of {counts['of']} test sentences"
    if counts["is_estimate"]:
        share = f"an estimate of {share} for all {counts['sentences']}, from a draw of its text"
    return f"{line} ({share})"

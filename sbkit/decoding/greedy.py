"""Greedy CTC decoding of one clip.

Legend: U frames of 40 ms, V vocabulary.
"""

import numpy as np

from sbkit.decoding.frames import LogProbs


def best_tokens(log_probs: LogProbs, blank: int) -> list[int]:
    """Return the best token of each frame, merge repeats, drop blanks: (U, V) -> ids."""
    best = log_probs.argmax(1)
    before = np.concatenate([[blank], best[:-1]])
    tokens: list[int] = best[(best != blank) & (best != before)].tolist()
    return tokens

"""Greedy decoding by an attention decoder, token by token.

Legend: B utterances, L tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sbkit.base.arrays import Counts, Int64s

# Takes the tokens to read (B, L), the decoder's state and whether a text begins; returns the best
# next tokens (B,) and the state after those that were read.
ReadTokens = Callable[[Int64s, Any, bool], tuple[Int64s, Any]]


def generate(
    read: ReadTokens, state: Any, *, start: Sequence[int], end: int, max_tokens: Counts
) -> list[list[int]]:
    """Return the text of each row as tokens, without its start and its end.

    max_tokens: of each text, with its start, (B,); one that reaches it has no end.
    """
    texts: list[list[int]] = [[] for _ in max_tokens]
    is_open = np.ones(len(max_tokens), np.bool_)
    tokens = np.tile(np.array(start, np.int64), (len(max_tokens), 1))
    for count in range(len(start), int(max_tokens.max(initial=0))):
        best, state = read(tokens, state, count == len(start))
        is_open &= (best != end) & (count < max_tokens)
        if not is_open.any():
            break
        for row in np.flatnonzero(is_open):
            texts[row].append(int(best[row]))
        tokens = best[:, None]
    return texts

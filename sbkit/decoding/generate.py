"""Greedy decoding by an attention decoder, token by token.

Legend: B utterances, L tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sbkit.base.arrays import Int64s

# Takes the tokens to read (B, L), the decoder's state and whether a text begins; returns the best
# next tokens (B,) and the state after those that were read.
ReadTokens = Callable[[Int64s, Any, bool], tuple[Int64s, Any]]


def generate(
    read: ReadTokens, state: Any, *, rows: int, start: Sequence[int], end: int, max_tokens: int
) -> list[list[int]]:
    """Return the text of each row as tokens, without its start and its end.

    max_tokens: of a text with its start; one that reaches it has no end.
    """
    texts: list[list[int]] = [[] for _ in range(rows)]
    is_open = np.ones(rows, np.bool_)
    tokens = np.tile(np.array(start, np.int64), (rows, 1))
    for count in range(len(start), max_tokens):
        best, state = read(tokens, state, count == len(start))
        is_open &= best != end
        if not is_open.any():
            break
        for row in np.flatnonzero(is_open):
            texts[row].append(int(best[row]))
        tokens = best[:, None]
    return texts

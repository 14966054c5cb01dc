"""Greedy decoding by an attention decoder, token by token, and the limit of a text.

Legend: B utterances, N texts, L tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sbkit.base.arrays import Counts, Int64s

# Takes the tokens to read (B, L), the decoder's state and whether a text begins; returns the best
# next tokens (B,) and the state after those that were read.
ReadTokens = Callable[[Int64s, Any, bool], tuple[Int64s, Any]]


def generate(
    read: ReadTokens,
    state: Any,
    frames: Counts,
    *,
    start: Sequence[int],
    end: int,
    max_tokens: int,
    max_frames: int,
) -> list[list[int]]:
    """Return the text of each row as tokens, without its start and its end.

    A text may have as many tokens a frame as the positions of both allow, so that one that repeats
    itself in a short clip soon ends.

    frames: of each row, (B,); max_tokens, max_frames: the positions, those of ``start`` included.
    """
    limits = len(start) + np.ceil(frames / max_frames * max_tokens).astype(np.int64)
    limits = limits.clip(max=max_tokens)
    texts: list[list[int]] = [[] for _ in limits]
    is_open = np.ones(len(limits), np.bool_)
    tokens = np.tile(np.array(start, np.int64), (len(limits), 1))
    for count in range(len(start), int(limits.max(initial=0))):
        best, state = read(tokens, state, count == len(start))
        is_open &= (best != end) & (count < limits)
        if not is_open.any():
            break
        for row in np.flatnonzero(is_open):
            texts[row].append(int(best[row]))
        tokens = best[:, None]
    return texts


def cut_texts(texts: Int64s, *, end: int, max_tokens: int) -> Int64s:
    """Cut texts to so many tokens and an end: (N, L), filled up with ends -> (N, L).

    A decoder's own text may have more once it is normalized: "9 9 9" becomes "nine nine nine".
    """
    texts = texts[:, : max_tokens + 1].copy()
    texts[:, -1] = end
    return texts

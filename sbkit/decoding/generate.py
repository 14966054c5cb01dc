"""Greedy decoding by an attention decoder, token by token.

Legend: B utterances, L tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sbkit.base.arrays import Counts, Int64s
from sbkit.text.decoder_tokenizer import GenerationSettings

# Takes the tokens to read (B, L), the decoder's state and whether a text begins; returns the best
# next tokens (B,) and the decoder's new state.
ReadTokens = Callable[[Int64s, Any, bool], tuple[Int64s, Any]]


def generate(
    read: ReadTokens, state: Any, frames: Counts, settings: GenerationSettings
) -> list[list[int]]:
    """Return the text of each row as tokens, without its start and its end: frames (B,).

    The limit of tokens shrinks in proportion to the clip, so that a text that repeats itself in a
    short clip ends soon.
    """
    num_start = len(settings.start)
    shares = frames / settings.max_frames
    limits = num_start + np.ceil(shares * settings.max_tokens).astype(np.int64)
    limits = limits.clip(max=settings.max_tokens)
    texts: list[list[int]] = [[] for _ in limits]
    is_open = np.ones(len(limits), np.bool_)
    tokens = np.tile(np.array(settings.start, np.int64), (len(limits), 1))
    for count in range(num_start, int(limits.max(initial=0))):
        best, state = read(tokens, state, count == num_start)
        is_open &= (best != settings.end) & (count < limits)
        if not is_open.any():
            break
        for row in np.flatnonzero(is_open):
            texts[row].append(int(best[row]))
        tokens = best[:, None]
    return texts

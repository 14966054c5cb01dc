"""The log-probabilities of overlapping pieces, cut so that each moment is in one of them.

Two pieces see the same audio in their overlap. Both are cut at one frame, in the longest gap that
the first one heard between two tokens, so that no word is lost and none is there twice: CTC has a
frame for each moment, whatever is decoded from it.

Legend: U frames, V vocabulary.
"""

from collections.abc import Collection

import numpy as np

from sbkit.decoding.frames import LogProbs


def find_gap(log_probs: LogProbs, overlap: int, silent: Collection[int]) -> int:
    """Return the frame to cut at: in the longest gap of the middle half of the last ``overlap``.

    silent: the tokens that are no speech, blank and space. Without a gap it is in the middle.
    """
    first, last = len(log_probs) - 3 * overlap // 4, len(log_probs) - overlap // 4
    heard = np.flatnonzero(~np.isin(log_probs[first:last].argmax(1), list(silent)))
    edges = np.concatenate([[-1], heard, [last - first]])
    longest = int(np.argmax(np.diff(edges)))
    return first + int(edges[longest] + edges[longest + 1] + 1) // 2

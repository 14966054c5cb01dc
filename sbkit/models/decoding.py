"""Greedy CTC decoding.

Legend: B utterances, U frames of 40 ms, V vocabulary.
"""

import torch
from torch import Tensor

from sbkit.audio.lengths import length_mask


def greedy(log_probs: Tensor, frame_lengths: Tensor, blank: int) -> list[list[int]]:
    """Return the best token of each frame, merge repeats, drop blanks: (B, U, V), (B,) -> ids.

    One transfer from the device for the whole batch.
    """
    best = log_probs.argmax(-1)  # (B, U)
    before = torch.nn.functional.pad(best[:, :-1], (1, 0), value=blank)
    keep = (
        (best != before) & (best != blank) & length_mask(frame_lengths, best.shape[1], best.device)
    )
    marked = torch.where(keep, best, -1).cpu()
    return [row[row >= 0].tolist() for row in marked]

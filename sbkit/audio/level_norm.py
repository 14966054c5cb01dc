"""Remove the level of speech from log-mel features, so that a quiet microphone changes nothing.

Legend: B utterances or sessions, T frames of 10 ms, M mel bins.

The level is the mean log power of the frames, each weighted by its power. Four seconds of pause for
each second of speech, 20 dB below it, lower it by 0.9 dB; they lower the mean power by 6.8 dB.
"""

import torch
from torch import Tensor

from sbkit.audio.lengths import length_mask, widest_float

LEVELS = ("utterance", "running", "none")  # over an utterance, over its frames so far, or kept
# In log power. White noise of -65 dBFS (RMS) has 17, so quieter noise is not raised to the level of
# speech. The test clips of the default corpus have 24.4 to 27.2, and at -30 dB 17.5 to 20.3.
MIN_LEVEL = 17.0
# In log energy, 61 dB. What is further below the level becomes 0, as the padding is: there, steps
# of int16 would be audible in quiet clips, but not in loud ones.
RANGE = 14.0
MEMORY_FRAMES = 500  # 5 s, after which the weight of a frame in a running level is 1 / e
MIN_WEIGHT = 1e-9  # of all frames; digital silence has less


def remove_level(
    features: Tensor, lengths: Tensor, *, level: str, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Subtract the level: (B, T, M), (B,) -> log energies (B, T, M) from 0 up, 0 in the padding.

    sums: (B, 2) of earlier frames, for a running level; zeros before the first. Those after the
        last frame are returned.
    """
    if level == "none":
        return features, sums
    mask = length_mask(lengths, features.shape[1], features.device)
    power = features.logsumexp(-1).to(widest_float(features.device)) - MIN_LEVEL  # (B, T)
    weights = power.exp() * mask
    terms = torch.stack([weights * power, weights], 1)  # (B, 2, T)
    if level == "running":
        terms, sums = _accumulate(terms, sums)
    else:
        terms = terms.sum(-1, keepdim=True)
    height = (terms[:, :1] / terms[:, 1:].clamp(min=MIN_WEIGHT)).clamp(min=0)  # (B, 1, T or 1)
    zero = (height.transpose(1, 2) + (MIN_LEVEL - RANGE)).to(features.dtype)
    return (features - zero).relu() * mask.unsqueeze(-1), sums


def _accumulate(terms: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Add the terms up to each frame, (B, 2, T), and return the sums after the last, (B, 2).

    Later frames weigh more, instead of earlier ones less: only the ratio of the sums counts.
    """
    count = torch.arange(1, terms.shape[2] + 1, device=terms.device)
    growth = (count.to(terms.dtype) / MEMORY_FRAMES).exp()
    totals = (terms * growth).cumsum(-1) + sums.unsqueeze(-1)
    return totals, (totals[..., -1] / growth[-1]).to(sums.dtype)

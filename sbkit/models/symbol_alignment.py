"""Align the frames of a clip with the symbols of its text, without labels.

Legend: B utterances, U frames, L symbols.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, pad

BLANK_LOG_PROB = -1.0  # before normalization, as in Badlani et al.
IMPOSSIBLE = -1e4  # a log-probability
MAX_SPELLED_SYMBOLS = 4  # of a text that may be an abbreviation
MAX_SHORT_SHARE = 0.6  # of symbols with a single frame


def forward_sum(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Sum over all monotonic alignments: (B, U, L) unnormalized, (B,), (B,) -> (B,).

    Source: Badlani et al. 2021, One TTS Alignment To Rule Them All (arXiv 2108.10447).
    """
    with_blank = pad(log_probs.float(), (1, 0), value=BLANK_LOG_PROB).log_softmax(2)
    classes = torch.arange(1, log_probs.shape[2] + 1).expand(len(log_probs), -1)
    return ctc_loss(
        with_blank.transpose(0, 1),
        classes.to(log_probs.device),
        frame_lengths,
        symbol_lengths,
        reduction="none",
        zero_infinity=True,
    )


@lru_cache(maxsize=4096)
def diagonal_prior(frames: int, symbols: int) -> Tensor:
    """Return log-probabilities that prefer the diagonal: (U, L), each row a beta-binomial."""
    frame = torch.arange(1, frames + 1).unsqueeze(1).double()
    symbol, count = torch.arange(symbols).double(), symbols - 1.0
    a, b = frame, frames + 1 - frame

    def beta(x: Tensor, y: Tensor) -> Tensor:
        return x.lgamma() + y.lgamma() - (x + y).lgamma()

    chosen = -beta(count - symbol + 1, symbol + 1) - float(np.log(count + 1))
    return (chosen + beta(symbol + a, count - symbol + b) - beta(a, b)).float()


def diagonal_priors(scores: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Return the prior of each utterance, impossible past its lengths: (B, U, L), (B,), (B,)."""
    priors = torch.full(scores.shape, IMPOSSIBLE)
    lengths = zip(frame_lengths.tolist(), symbol_lengths.tolist(), strict=True)
    for prior, (frames, symbols) in zip(priors, lengths, strict=True):
        prior[:frames, :symbols] = diagonal_prior(frames, symbols)
    return priors.to(scores.device)


def find_durations(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Count the frames of each symbol on the best monotonic path: (B, U, L), (B,), (B,) -> (B, L).

    Each symbol has at least one; if there are more symbols than frames, the last have none.
    """
    scores = log_probs.detach().float().cpu().numpy().transpose(1, 0, 2)  # (U, B, L)
    frames, utterances, symbols = scores.shape
    advances = np.zeros(
        (frames, utterances, symbols), bool
    )  # the path comes from the symbol before
    best = np.full((utterances, symbols), 2 * IMPOSSIBLE * frames)
    best[:, 0] = scores[0, :, 0]
    for frame in range(1, frames):
        previous = np.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=-np.inf)
        advances[frame] = previous > best
        best = np.maximum(previous, best) + scores[frame]
    durations = np.zeros((utterances, symbols), np.int64)
    lengths, utterance = frame_lengths.numpy(), np.arange(utterances)
    symbol = np.minimum(symbol_lengths.numpy(), lengths) - 1
    for frame in range(frames - 1, -1, -1):
        within = frame < lengths
        durations[utterance[within], symbol[within]] += 1
        symbol = symbol - (within & advances[frame, utterance, symbol])
    return torch.from_numpy(durations)


def find_misaligned(
    durations: Tensor, symbol_lengths: Tensor, is_pause: Tensor, max_frames: float
) -> Tensor:
    """Check each utterance for durations that no speech has: (B, L), (B,), (B, L) -> (B,).

    They occur when the text does not match the audio: a letter has more than ``max_frames`` frames,
    or most symbols have one. In texts of few letters, a letter may be a word, as in "DVD".
    """
    counts = symbol_lengths.to(durations.device)
    is_long = durations.masked_fill(is_pause, 0).amax(1) > max_frames
    is_short = (durations == 1).sum(1) > MAX_SHORT_SHARE * counts
    is_misaligned: Tensor = (is_long & (counts > MAX_SPELLED_SYMBOLS)) | is_short
    return is_misaligned


def expand(states: Tensor, index: Tensor) -> Tensor:
    """Return the state of each frame's symbol: (B, L, D), (B, U) -> (B, U, D)."""
    return states.gather(1, index.unsqueeze(2).expand(-1, -1, states.shape[2]))


def frame_index(durations: Tensor, frames: int) -> Tensor:
    """Return the symbol index of each frame: (B, L) -> (B, U); past the end, the last symbol's."""
    ends = durations.cumsum(1)
    frame = torch.arange(frames, device=durations.device).expand(len(durations), -1).contiguous()
    return torch.searchsorted(ends, frame, right=True).clamp(max=durations.shape[1] - 1)


def mean_by_symbol(values: Tensor, index: Tensor, durations: Tensor) -> Tensor:
    """Return the mean over each symbol's frames: (B, U), (B, U), (B, L) -> (B, L).

    Frames past the end must be 0. A symbol without frames has 0.
    """
    sums = torch.zeros_like(durations, dtype=values.dtype).scatter_add(1, index, values)
    return sums / durations.clamp(min=1)

"""Which frames of a clip are which symbol of its text, learned without any label.

Legend: B utterances, U frames, L symbols.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, pad

BLANK = -1.0  # log-probability of no symbol, before all are normalized; Badlani et al. have it so
NEVER = -1e4
SPELLED = 4  # symbols of a text that may be an abbreviation
MOST_SHORT = 0.6  # of the symbols that may have a single frame


def forward_sum(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Sum over all monotonic alignments: (B, U, L) unnormalized, (B,), (B,) -> (B,).

    Source: Badlani et al. 2021, One TTS Alignment To Rule Them All (arXiv 2108.10447).
    """
    with_blank = pad(log_probs.float(), (1, 0), value=BLANK).log_softmax(2)
    places = torch.arange(1, log_probs.shape[2] + 1).expand(len(log_probs), -1)
    return ctc_loss(
        with_blank.transpose(0, 1),
        places.to(log_probs.device),
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
    """Return the prior of each utterance, `NEVER` past its lengths: (B, U, L), (B,), (B,)."""
    priors = torch.full(scores.shape, NEVER)
    rows = zip(priors, frame_lengths.tolist(), symbol_lengths.tolist(), strict=True)
    for prior, frames, symbols in rows:
        prior[:frames, :symbols] = diagonal_prior(frames, symbols)
    return priors.to(scores.device)


def find_durations(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Count the frames of each symbol on the best monotonic path: (B, U, L), (B,), (B,) -> (B, L).

    Each symbol has one at least; of more symbols than frames the last ones have none.
    """
    scores = log_probs.detach().float().cpu().numpy().transpose(1, 0, 2)  # (U, B, L)
    frames, rows, symbols = scores.shape
    came = np.zeros((frames, rows, symbols), bool)  # from the symbol before
    best = np.full((rows, symbols), 2 * NEVER * frames)
    best[:, 0] = scores[0, :, 0]
    for frame in range(1, frames):
        before = np.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=-np.inf)
        came[frame] = before > best
        best = np.maximum(before, best) + scores[frame]
    durations = np.zeros((rows, symbols), np.int64)
    lengths, row = frame_lengths.numpy(), np.arange(rows)
    place = np.minimum(symbol_lengths.numpy(), lengths) - 1
    for frame in range(frames - 1, -1, -1):
        within = frame < lengths
        durations[row[within], place[within]] += 1
        place = place - (within & came[frame, row, place])
    return torch.from_numpy(durations)


def find_misaligned(
    durations: Tensor, symbol_lengths: Tensor, is_pause: Tensor, longest: float
) -> Tensor:
    """Check each utterance for durations that no speech has: (B, L), (B,), (B, L) -> (B,).

    Those of a letter of more than ``longest`` frames, or of a single frame for most symbols, as
    where the text is not what is said. The letters of a few may be words, as those of "DVD".
    """
    counts = symbol_lengths.to(durations.device)
    is_long = durations.masked_fill(is_pause, 0).amax(1) > longest
    is_short = (durations == 1).sum(1) > MOST_SHORT * counts
    found: Tensor = (is_long & (counts > SPELLED)) | is_short
    return found


def expand(states: Tensor, index: Tensor) -> Tensor:
    """Return the state of the symbol of each frame: (B, L, D), (B, U) -> (B, U, D)."""
    return states.gather(1, index.unsqueeze(2).expand(-1, -1, states.shape[2]))


def frame_index(durations: Tensor, frames: int) -> Tensor:
    """Return which symbol each frame is of: (B, L) -> (B, U); the last one's past the end."""
    ends = durations.cumsum(1)
    at = torch.arange(frames, device=durations.device).expand(len(durations), -1).contiguous()
    return torch.searchsorted(ends, at, right=True).clamp(max=durations.shape[1] - 1)


def mean_by_symbol(values: Tensor, index: Tensor, durations: Tensor) -> Tensor:
    """Return the mean of the frames of each symbol: (B, U), (B, U), (B, L) -> (B, L).

    Frames past the end must be 0. A symbol without frames has 0.
    """
    sums = torch.zeros_like(durations, dtype=values.dtype).scatter_add(1, index, values)
    return sums / durations.clamp(min=1)

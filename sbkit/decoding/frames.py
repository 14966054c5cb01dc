"""The input and output of a search: log-probabilities, the tokens to try, and hypotheses.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError

LogProbs = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """How a beam search prunes, and which tokens it knows.

    vocab_size: V; beam_size: hypotheses kept after each frame; token_threshold: natural
    log-probability that a token must exceed to be appended at a frame (the best token of a frame is
    always tried; blanks and repeats always count); most_tokens: how many tokens may be appended at
    a frame, the likeliest, None for all; excluded: tokens that never are, such as `<unk>`.
    """

    vocab_size: int
    blank: int = 0
    beam_size: int = 16
    token_threshold: float = -inf
    most_tokens: int | None = None
    excluded: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A token sequence and its natural logarithmic scores; score is the sum of the three.

    tokens: ids without blanks; ctc_score: ln p(tokens | audio), of the alignments that the search
    kept; lm_score: all that the scorers add, weighted, hotword rewards among it;
    attention_score: ln p(tokens, end | audio) of an attention decoder, weighted.
    """

    tokens: tuple[int, ...]
    score: float
    ctc_score: float
    lm_score: float = 0.0
    attention_score: float = 0.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: log_probs (V,) of all tokens; candidates: (token, log-probability) to append."""

    log_probs: list[float]
    candidates: list[tuple[int, float]]


def make_frames(log_probs: LogProbs, settings: BeamSettings) -> list[Frame]:
    """Check log-probabilities (U, V) and list the candidates of each frame."""
    check_log_probs(log_probs, settings.vocab_size)
    log_probs = log_probs.astype(np.float64)
    tried = _tried(log_probs, settings)
    ends = np.cumsum(tried.sum(1))[:-1]
    tokens = [each.tolist() for each in np.split(np.nonzero(tried)[1], ends)]
    values = [each.tolist() for each in np.split(log_probs[tried], ends)]
    rows = zip(log_probs.tolist(), tokens, values, strict=False)  # of no frames, split makes one
    return [Frame(row, list(zip(*pair, strict=True))) for row, *pair in rows]


def check_log_probs(log_probs: LogProbs, vocab_size: int) -> None:
    """Raise SbkitError for another vocabulary, and for a frame without a finite largest value."""
    if log_probs.shape[1] != vocab_size:
        raise SbkitError(
            f"Log-probabilities must have as many columns as the tokenizer has tokens "
            f"({vocab_size}), but have {log_probs.shape[1]}. Decode with this model's own "
            "tokenizer."
        )
    best = log_probs.max(1, initial=-inf)  # NaN where one is
    if not np.isfinite(best).all():
        place = int(np.flatnonzero(~np.isfinite(best))[0])
        raise SbkitError(
            "Each frame's largest log-probability must be a finite number, but that of frame "
            f"{place} is {float(best[place])}. Look for NaN or infinity in the audio or the "
            "model's weights."
        )


def _tried(log_probs: LogProbs, settings: BeamSettings) -> npt.NDArray[np.bool_]:
    """Return which tokens may be appended: (U, V)."""
    allowed = np.ones(settings.vocab_size, dtype=bool)
    allowed[[settings.blank, *settings.excluded]] = False
    log_probs = np.where(allowed, log_probs, -inf)
    tried: npt.NDArray[np.bool_] = log_probs > settings.token_threshold
    tried = (tried | (log_probs == log_probs.max(1, keepdims=True))) & (log_probs > -inf)
    if settings.most_tokens is not None and settings.most_tokens < log_probs.shape[1]:
        kept = np.where(tried, log_probs, -inf)
        least = np.partition(kept, -settings.most_tokens, axis=1)[:, -settings.most_tokens]
        tried &= kept >= least[:, None]
    return tried

"""The input and output of decoders: log-probabilities, candidate tokens, hypotheses.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

import numpy as np

from sbkit.base.arrays import Bools, LogProbs
from sbkit.base.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """How a beam search prunes, and which tokens it may append.

    Attributes:
        vocab_size: V.
        beam_size: hypotheses kept after each frame.
        token_threshold: natural log-probability that a token must exceed to be appended at a frame.
            The best token of a frame is always tried; blanks and repeats always count.
        max_candidates: tokens appended at a frame, the likeliest first; None for no limit.
        excluded: tokens that are never appended, such as `<unk>`.
    """

    vocab_size: int
    blank: int = 0
    beam_size: int = 16
    token_threshold: float = -inf
    max_candidates: int | None = None
    excluded: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A token sequence with natural logarithmic scores.

    Attributes:
        tokens: ids without blanks.
        score: the sum of the three scores below.
        ctc_score: ln p(tokens | audio) over the alignments that the search kept.
        lm_score: the weighted sum of all scorers, hotword rewards included.
        attention_score: weighted ln p(tokens, end | audio) of an attention decoder.
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
    is_candidate = _find_candidates(log_probs, settings)
    ends = np.cumsum(is_candidate.sum(1))[:-1]
    tokens = [ids.tolist() for ids in np.split(np.nonzero(is_candidate)[1], ends)]
    values = [scores.tolist() for scores in np.split(log_probs[is_candidate], ends)]
    rows = zip(log_probs.tolist(), tokens, values, strict=False)  # without frames, split makes one
    return [Frame(row, list(zip(*pair, strict=True))) for row, *pair in rows]


def check_log_probs(log_probs: LogProbs, vocab_size: int) -> None:
    """Raise DataError for another vocabulary, or for a frame without a finite largest value."""
    if log_probs.shape[1] != vocab_size:
        raise DataError(
            f"The tokenizer has {vocab_size} tokens, but the model's log-probabilities have "
            f"{log_probs.shape[1]} columns. Decode with the model's own tokenizer."
        )
    best = log_probs.max(1, initial=-inf)  # NaN where the frame contains one
    if not np.isfinite(best).all():
        frame = int(np.flatnonzero(~np.isfinite(best))[0])
        raise DataError(
            f"The largest log-probability of a frame must be finite, but that of frame {frame} is "
            f"{float(best[frame])}. Look for NaN or infinity in the audio or the model's weights."
        )


def _find_candidates(log_probs: LogProbs, settings: BeamSettings) -> Bools:
    """Return which tokens may be appended: (U, V)."""
    is_allowed = np.ones(settings.vocab_size, dtype=bool)
    is_allowed[[settings.blank, *settings.excluded]] = False
    log_probs = np.where(is_allowed, log_probs, -inf)
    is_candidate: Bools = log_probs > settings.token_threshold
    is_candidate |= log_probs == log_probs.max(1, keepdims=True)
    is_candidate &= log_probs > -inf
    if settings.max_candidates is not None and settings.max_candidates < log_probs.shape[1]:
        scores = np.where(is_candidate, log_probs, -inf)
        count = settings.max_candidates
        lowest = np.partition(scores, -count, axis=1)[:, -count]
        is_candidate &= scores >= lowest[:, None]
    return is_candidate

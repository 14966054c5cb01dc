"""One answer of a beam search."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A token sequence and its natural logarithmic scores; score = ctc_score + lm_score.

    tokens: ids without blanks; ctc_score: ln p(tokens | audio), of the alignments that the beam
    kept; lm_score: all that the scorers add, weighted, hotword rewards among it.
    """

    tokens: tuple[int, ...]
    score: float
    ctc_score: float
    lm_score: float

"""One answer of a beam search."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A token sequence and its natural logarithmic scores; score is the sum of the three.

    tokens: ids without blanks; ctc_score: ln p(tokens | audio), of the alignments that the beam
    kept; lm_score: all that the scorers add, weighted, hotword rewards among it;
    attention_score: ln p(tokens, end | audio) of an attention decoder, weighted.
    """

    tokens: tuple[int, ...]
    score: float
    ctc_score: float
    lm_score: float
    attention_score: float = 0.0

"""What a decoder takes an utterance for."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Hypothesis:
    """One reading of an utterance.

    Attributes:
        score: what the hypotheses of an utterance are compared by: the sum of all scores.
        tokens: ids of the vocabulary.
        ctc: the log-probability of the tokens by CTC, over the alignments that were followed.
    """

    score: float
    tokens: tuple[int, ...]
    ctc: float

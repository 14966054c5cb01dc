"""How far confidences can be believed: of those of 0.8, four words in five are to be right."""

from collections.abc import Sequence
from dataclasses import dataclass

BINS = 10


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Words of similar confidence: how many, their mean confidence, and the share of right ones."""

    count: int
    confidence: float
    right: float


def reliability_bins(words: Sequence[tuple[float, bool]]) -> tuple[Bin, ...]:
    """Sort words by tenths of their confidence, 0 to 1; each says, too, whether it is right.

    Bins without words are left out.
    """
    sorted_in: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for each in words:
        sorted_in[min(BINS - 1, int(each[0] * BINS))].append(each)
    return tuple(
        Bin(
            count=len(each),
            confidence=sum(confidence for confidence, _ in each) / len(each),
            right=sum(right for _, right in each) / len(each),
        )
        for each in sorted_in
        if each
    )

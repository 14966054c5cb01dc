"""A scorer as tensors, so that a whole batch asks it at once.

Legend: S states, V vocabulary.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.decoding.frames import BeamSettings
from sbkit.decoding.scorer import Scorer

LARGEST = 1 << 16  # states; of 1,000 tokens each, they take 0.8 GB


@dataclass(frozen=True, eq=False)
class ScorerTable:
    """All states that a scorer can reach; state 0 is its start.

    scores, next_states: (S, V) what a token adds, and the state after it; ends: (S,) what the end
    adds.
    """

    scores: Tensor
    next_states: Tensor
    ends: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the table on a device, with scores of a type."""
        return type(self)(
            self.scores.to(device, dtype), self.next_states.to(device), self.ends.to(device, dtype)
        )


def tabulate(scorer: Scorer, settings: BeamSettings, *, largest: int = LARGEST) -> ScorerTable:
    """Ask a scorer for every state and token; a token n-gram has a state for each context.

    Raises SbkitError where more states than ``largest`` are reached, as with a large lexicon.
    """
    start = scorer.start()
    numbers: dict[Hashable, int] = {start: 0}
    waiting = deque([start])
    tokens = sorted({*range(settings.vocab_size)} - {settings.blank, *settings.excluded})
    scores, nexts, ends = list[list[float]](), list[list[int]](), list[float]()
    while waiting:
        state = waiting.popleft()
        row, after = [0.0] * settings.vocab_size, [0] * settings.vocab_size
        for token in tokens:
            row[token], reached = scorer.step(state, token)
            if reached not in numbers:
                numbers[reached] = len(numbers)
                waiting.append(reached)
            after[token] = numbers[reached]
        if len(numbers) > largest:
            raise SbkitError(
                f"A scorer for batches must have at most {largest} states, but has more. Use a "
                "token model of lower order, or decode one utterance at a time."
            )
        scores.append(row)
        nexts.append(after)
        ends.append(scorer.end(state))
    doubles = torch.tensor(scores, dtype=torch.float64), torch.tensor(ends, dtype=torch.float64)
    return ScorerTable(doubles[0], torch.tensor(nexts), doubles[1])

"""Several scorers as one."""

from collections.abc import Hashable
from typing import Any

from sbkit.decoding.prefix_beam import Scorer


class SumScorer:
    """Add what two scorers say."""

    def __init__(self, first: Scorer, second: Scorer) -> None:
        self._first, self._second = first, second

    def start(self) -> tuple[Hashable, Hashable]:
        """Return the states before the first token."""
        return self._first.start(), self._second.start()

    def step(self, state: tuple[Any, Any], token: int) -> tuple[float, tuple[Hashable, Hashable]]:
        """Score a token by both."""
        one, after_one = self._first.step(state[0], token)
        other, after_other = self._second.step(state[1], token)
        return one + other, (after_one, after_other)

    def end(self, state: tuple[Any, Any]) -> float:
        """Score the end by both."""
        return self._first.end(state[0]) + self._second.end(state[1])

"""Scorers add to the CTC score of a token sequence, token by token: language models, hotwords.

A scorer is a deterministic weighted automaton over tokens. A beam search needs the same arcs again
and again, so `LazyAutomaton` keeps them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sbkit.lm.ngram import END, NgramModel

REMEMBERED = 1 << 17  # states, of 1 to 4 kB each with their arcs; with fewer, decoding is slower


class Scorer(Protocol):
    """Scores of token sequences; equal states have equal futures."""

    def start(self) -> Hashable:
        """Return the state of the empty sequence."""

    def step(self, state: Any, token: int) -> tuple[float, Hashable]:
        """Return the score of a token after a state, and the state after it."""

    def end(self, state: Any) -> float:
        """Return the score of the end of the audio."""


class SumOfScorers:
    """Add the scores of several scorers."""

    def __init__(self, *, scorers: Sequence[Scorer]) -> None:
        self._scorers = tuple(scorers)

    def start(self) -> Hashable:
        """Return the states of all."""
        return tuple(scorer.start() for scorer in self._scorers)

    def step(self, state: Sequence[Any], token: int) -> tuple[float, Hashable]:
        """Return the sum of their scores, and their states."""
        total, after = 0.0, list[Hashable]()
        for scorer, each in zip(self._scorers, state, strict=True):
            score, reached = scorer.step(each, token)
            total += score
            after.append(reached)
        return total, tuple(after)

    def end(self, state: Sequence[Any]) -> float:
        """Return the sum of their end scores."""
        return sum(scorer.end(each) for scorer, each in zip(self._scorers, state, strict=True))


NOTHING = SumOfScorers(scorers=())


Arc = tuple[float, Hashable]
"""The score of a token, and the scorer's state after it."""


@dataclass(eq=False, slots=True)
class AutomatonState:
    """A scorer's state, with the arcs that were computed, by token."""

    of_scorer: Hashable
    arcs: dict[int, Arc] = field(default_factory=dict)


class LazyAutomaton:
    """The states and arcs of a scorer, each computed when it is first needed.

    A dictionary lookup by token takes the place of a call; and a state is hashed only where a
    prefix enters the beam.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._states = dict[Hashable, AutomatonState]()

    def limit(self) -> None:
        """Forget all states where there are too many; a search calls it before it begins."""
        if len(self._states) > REMEMBERED:
            self._states = {}

    def start(self) -> AutomatonState:
        """Return the start state."""
        return self.state(self._scorer.start())

    def state(self, of_scorer: Hashable) -> AutomatonState:
        """Return the one state of the automaton that stands for a scorer's."""
        state = self._states.get(of_scorer)
        if state is None:
            state = self._states[of_scorer] = AutomatonState(of_scorer)
        return state

    def expand(self, state: AutomatonState, token: int) -> Arc:
        """Compute an arc, and keep it."""
        arc = state.arcs[token] = self._scorer.step(state.of_scorer, token)
        return arc

    def end(self, of_scorer: Hashable) -> float:
        """Return the score of the end of the audio after a state of the scorer."""
        return self._scorer.end(of_scorer)


class TokenScorer:
    """Add lm_weight * ln P(tokens `</s>`) + token_bonus * (number of tokens).

    lm: its words are pieces of the tokenizer, `▁` included; pieces: by token id.
    """

    def __init__(
        self,
        *,
        lm: NgramModel,
        pieces: Sequence[str],
        lm_weight: float = 0.5,
        token_bonus: float = 0.0,
    ) -> None:
        self._lm, self._lm_weight, self._token_bonus = lm, lm_weight, token_bonus
        self._ids = [lm.id_of(piece) for piece in pieces]

    def start(self) -> Hashable:
        """Return the state after `<s>`."""
        return self._lm.start

    def step(self, state: int, token: int) -> tuple[float, Hashable]:
        """Return the weighted log-probability of a token, and the state after it."""
        log_prob, after = self._lm.score(state, self._ids[token])
        return self._lm_weight * log_prob + self._token_bonus, after

    def end(self, state: int) -> float:
        """Return the weighted log-probability of `</s>`."""
        return self._lm_weight * self._lm.score(state, END)[0]

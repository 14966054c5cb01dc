"""CTC prefix beam search with scorers, for one utterance at a time.

A prefix is a node of a tree. With each goes the probability of the alignments that end in a blank,
and of those that end in its last token (Hannun et al., "First-pass large vocabulary continuous
speech recognition using bi-directional recurrent DNNs", 2014); scorers add to it what they think of
the tokens. Without pruning the result is exact: every alignment is in the sum of its text.

Legend: U frames, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf, log
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.decoding.hypothesis import Hypothesis

LogProbs = npt.NDArray[np.floating[Any]]


class Scorer(Protocol):
    """What judges the tokens of a hypothesis one by one, as a language model does."""

    def start(self) -> Hashable:
        """Return the state before the first token."""
        ...

    def step(self, state: Any, token: int) -> tuple[float, Hashable]:
        """Return what a token adds to the score after a state, and the state after it."""
        ...

    def end(self, state: Any) -> float:
        """Return what the end of the utterance adds."""
        ...


@dataclass(frozen=True)
class NoScorer:
    """Leaves everything to CTC."""

    def start(self) -> None:
        """Return no state."""

    def step(self, state: None, token: int) -> tuple[float, None]:
        """Add nothing."""
        return 0.0, None

    def end(self, state: None) -> float:
        """Add nothing."""
        return 0.0


class _Prefix:
    """A node of the tree of prefixes: its last token, its parent, and what the scorer says of it.

    blank, token: the probability of the alignments that end so, scaled; of this frame.
    """

    __slots__ = ("blank", "children", "last", "parent", "score", "state", "token")

    def __init__(self, parent: "_Prefix | None", last: int, score: float, state: Any) -> None:
        self.parent, self.last, self.score, self.state = parent, last, score, state
        self.children: dict[int, _Prefix] = {}
        self.blank = self.token = 0.0

    def tokens(self) -> tuple[int, ...]:
        tokens = []
        node: _Prefix = self
        while node.parent is not None:
            tokens.append(node.last)
            node = node.parent
        return tuple(reversed(tokens))


@dataclass(frozen=True, kw_only=True)
class PrefixBeam:
    """CTC prefix beam search.

    Attributes:
        scorer: what is added to the score of CTC.
        blank: the id of the blank.
        skip: ids that are never written, such as ``<unk>``.
        beam_size: prefixes that are kept after each frame; None: all.
        max_candidates: tokens of a frame that are tried, the most likely ones; None: all.
        min_log_prob: tokens of a frame below it are not tried; None: all are.
    """

    scorer: Scorer
    blank: int
    skip: frozenset[int] = frozenset()
    beam_size: int | None = 16
    max_candidates: int | None = 12
    min_log_prob: float | None = -6.0

    def __post_init__(self) -> None:
        """Refuse a beam that holds nothing."""
        if self.beam_size is not None and self.beam_size < 1:
            raise SbkitError(f"`beam_size` must be at least 1, but is {self.beam_size}. Take 16.")

    def decode(self, log_probs: LogProbs, *, nbest: int = 1) -> list[Hypothesis]:
        """Return the best hypotheses of an utterance, the best first: (U, V) -> at most ``nbest``.

        Raises:
            SbkitError: a log-probability is not a number, or nothing at all can be said.
        """
        if np.isnan(log_probs).any() or (len(log_probs) and (log_probs.max(1) == -inf).any()):
            raise SbkitError(
                "Every frame must have a token that is possible, but one has none: the model's "
                "output is not a number. Look at its weights."
            )
        root = _Prefix(None, -1, 0.0, self.scorer.start())
        root.blank = 1.0
        beam, scale = [root], 0.0
        for candidates, blank in self._candidates(log_probs):
            active = self._step(beam, candidates, blank)
            largest = max(node.blank + node.token for node in active)
            beam = self._prune(active)
            for node in beam:
                node.blank /= largest
                node.token /= largest
            scale += log(largest)
        return self._finish(beam, scale, nbest)

    def _candidates(self, log_probs: LogProbs) -> list[tuple[list[tuple[int, float]], float]]:
        """Return for each frame the tokens to try, with their probabilities, and the blank's."""
        probs = np.exp(log_probs.astype(np.float64))
        tried = probs > 0 if self.min_log_prob is None else log_probs > self.min_log_prob
        tried[:, [self.blank, *self.skip]] = False
        if self.max_candidates is not None and self.max_candidates < probs.shape[1]:
            allowed = np.where(tried, probs, 0.0)
            least = np.partition(allowed, -self.max_candidates, axis=1)[:, -self.max_candidates]
            tried &= allowed >= least[:, None]
        frames, tokens = np.nonzero(tried)
        starts = np.searchsorted(frames, np.arange(len(probs) + 1)).tolist()
        pairs = list(zip(tokens.tolist(), probs[frames, tokens].tolist(), strict=True))
        return [
            (pairs[first:last], blank)
            for first, last, blank in zip(
                starts, starts[1:], probs[:, self.blank].tolist(), strict=False
            )
        ]

    def _step(
        self, beam: Sequence[_Prefix], candidates: Sequence[tuple[int, float]], blank: float
    ) -> list[_Prefix]:
        """Follow all alignments by one frame; return the prefixes that some of them reach."""
        before = [(node, node.blank, node.token) for node in beam]
        probs = dict(candidates)
        for node, ends_in_blank, ends_in_token in before:
            node.blank = (ends_in_blank + ends_in_token) * blank
            node.token = ends_in_token * probs.get(node.last, 0.0)
        active = dict.fromkeys(beam)
        for node, ends_in_blank, ends_in_token in before:
            both, last, children = ends_in_blank + ends_in_token, node.last, node.children
            for token, prob in candidates:
                reached = (ends_in_blank if token == last else both) * prob
                if reached == 0.0:
                    continue
                child = children.get(token)
                if child is None:
                    added, state = self.scorer.step(node.state, token)
                    child = children[token] = _Prefix(node, token, node.score + added, state)
                if child in active:
                    child.token += reached
                else:
                    active[child] = None
                    child.blank, child.token = 0.0, reached
        return [node for node in active if node.blank or node.token]

    def _prune(self, active: list[_Prefix]) -> list[_Prefix]:
        if self.beam_size is None or len(active) <= self.beam_size:
            return active
        return nlargest(
            self.beam_size, active, key=lambda node: log(node.blank + node.token) + node.score
        )

    def _finish(self, beam: Sequence[_Prefix], scale: float, nbest: int) -> list[Hypothesis]:
        found = []
        for node in beam:
            ctc = log(node.blank + node.token) + scale
            score = ctc + node.score + self.scorer.end(node.state)
            found.append(Hypothesis(score, node.tokens(), ctc))
        return nlargest(nbest, found)

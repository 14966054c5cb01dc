"""CTC prefix beam search over one utterance, exact if the beam is unbounded.

Legend: U frames of 40 ms, V vocabulary.

Each prefix carries two probabilities, of the alignments that end in a blank and of those that end
in its last token, after Graves (2012, "Sequence transduction with recurrent neural networks") and
Hannun et al. (2014, arXiv 1408.2873). The scores of the scorers depend only on the prefix.
"""

from dataclasses import dataclass, field, replace
from math import exp, inf, log1p
from operator import attrgetter, itemgetter
from typing import NamedTuple

from sbkit.base.arrays import LogProbs
from sbkit.decoding.frames import BeamSettings, Frame, Hypothesis, make_frames
from sbkit.decoding.scorer import NO_SCORERS, Arc, AutomatonState, LazyAutomaton, PrefixScorer

Path = tuple["Path", int] | None
"""The tokens of a prefix: (the earlier tokens, the last one), None for no tokens."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A token sequence as a node of a tree, with its probabilities after the latest frame.

    Two prefixes are equal only if they are one object. A prefix does not refer to its parent, so
    that a part of the tree that no prefix of the beam leads to is freed at once.

    Attributes:
        path: the tokens.
        token: the last token, -1 for none.
        state: the state of the scorers.
        added: the sum of the scorers.
        in_blank, in_token: ln p of the alignments that end in a blank, and in the token.
        total: ln of the sum of both.
        score: total + added.
        was_blank, was_total: in_blank and total one frame earlier.
        frame: index of the latest frame at which the prefix was in the beam.
        children: by token, the longer prefixes that were ever in the beam.
    """

    path: Path
    token: int
    state: AutomatonState
    added: float
    in_blank: float = -inf
    in_token: float = -inf
    total: float = -inf
    score: float = -inf
    was_blank: float = -inf
    was_total: float = -inf
    frame: int = -1
    children: "dict[int, Prefix]" = field(default_factory=dict)

    def tokens(self) -> tuple[int, ...]:
        """Return the tokens from the first to the last."""
        path, tokens = self.path, []
        while path is not None:
            path, token = path
            tokens.append(token)
        return tuple(reversed(tokens))


class BeamState(NamedTuple):
    """The state of a search: the number of frames read, and the beam, which is updated in place."""

    num_frames: int
    beam: list[Prefix]

    def copy(self) -> "BeamState":
        """Return an independent copy."""
        copies: dict[int, Prefix] = {}
        pending = [*self.beam]
        while pending:
            prefix = pending.pop()
            if id(prefix) not in copies:
                copies[id(prefix)] = replace(prefix)
                pending += prefix.children.values()
        for prefix in copies.values():
            prefix.children = {token: copies[id(child)] for token, child in prefix.children.items()}
        return BeamState(self.num_frames, [copies[id(prefix)] for prefix in self.beam])


Extension = tuple[float, float, Prefix, int, Arc | None]
"""Score, ln p, the prefix, the appended token, and the scorers' arc, None if none is appended."""


class PrefixBeamSearch:
    """Find the best token sequences of an utterance, scorers included.

    `decode` takes a whole clip. A stream takes `start`, `advance` for each part and `finish`, with
    the same results wherever it is cut.

    >>> import numpy as np
    >>> search = PrefixBeamSearch(settings=BeamSettings(vocab_size=3))
    >>> frames = np.log(np.array([[0.4, 0.5, 0.1], [0.5, 0.4, 0.1]]))
    >>> [hypothesis.tokens for hypothesis in search.decode(frames)][:2]
    [(1,), ()]
    """

    def __init__(self, *, settings: BeamSettings, scorer: PrefixScorer = NO_SCORERS) -> None:
        self.settings = settings
        self._automaton = LazyAutomaton(scorer)

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the beam of natural log-probabilities (U, V), the best hypothesis first."""
        return self.finish(self.advance(self.start(), log_probs))

    def start(self) -> BeamState:
        """Return the state before the first frame."""
        self._automaton.limit()
        root = Prefix(None, -1, self._automaton.start(), 0.0, in_blank=0.0, total=0.0)
        return BeamState(0, [root])

    def advance(self, state: BeamState, log_probs: LogProbs) -> BeamState:
        """Return the state after more frames, natural log-probabilities (U, V).

        The earlier state is no longer valid. Raises DataError for another vocabulary, or for
        frames without a finite largest value.
        """
        frames = make_frames(log_probs, self.settings)
        beam = state.beam
        for index, frame in enumerate(frames, start=state.num_frames):
            self._stay(beam, frame, index)
            extensions = self._extend(beam, frame, index) if frame.candidates else []
            beam = self._select(beam, extensions)
        return BeamState(state.num_frames + len(frames), beam)

    def finish(self, state: BeamState) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        They are distinct, and impossible ones are left out. The state stays valid: more frames may
        follow it, so these may be partial hypotheses.
        """
        hypotheses = map(self._hypothesis, state.beam)
        possible = [hypothesis for hypothesis in hypotheses if hypothesis.score > -inf]
        return sorted(possible, key=attrgetter("score"), reverse=True)

    def _stay(self, beam: list[Prefix], frame: Frame, index: int) -> None:
        """Let each prefix read a blank or its last token again, which does not extend it."""
        log_probs, blank = frame.log_probs, frame.log_probs[self.settings.blank]
        for prefix in beam:
            prefix.frame = index
            prefix.was_blank, prefix.was_total = prefix.in_blank, prefix.total
            prefix.in_blank = prefix.total + blank
            if prefix.token >= 0:
                prefix.in_token += log_probs[prefix.token]
            prefix.total = log_add(prefix.in_blank, prefix.in_token)
            prefix.score = prefix.total + prefix.added

    def _extend(self, beam: list[Prefix], frame: Frame, index: int) -> list[Extension]:
        """Append each candidate to each prefix; return the extensions that are not in the beam.

        An extension that is another prefix of the beam adds to that prefix. A repeated token needs
        a blank before it, or it would be merged.
        """
        extensions: list[Extension] = []
        expand, candidates = self._automaton.expand, frame.candidates
        append, floor = extensions.append, self._floor(beam)
        for prefix in beam:
            last, added = prefix.token, prefix.added
            total, blank = prefix.was_total, prefix.was_blank
            children, state, arcs = prefix.children, prefix.state, prefix.state.arcs
            for token, log_prob in candidates:
                log_prob += blank if token == last else total
                if token in children and (child := children[token]).frame == index:
                    child.in_token = log_add(child.in_token, log_prob)
                    child.total = log_add(child.total, log_prob)
                    child.score = child.total + child.added
                    continue
                arc = arcs.get(token) or expand(state, token)
                score = log_prob + added + arc[0]
                if score > floor:
                    append((score, log_prob, prefix, token, arc))
        return extensions

    def _floor(self, beam: list[Prefix]) -> float:
        """Return a score that an extension must exceed to be in the next beam.

        A full beam may stay as it is, so no extension below its worst prefix can enter.
        """
        if len(beam) < self.settings.beam_size:
            return -inf
        return min(prefix.score for prefix in beam)

    def _select(self, beam: list[Prefix], extensions: list[Extension]) -> list[Prefix]:
        """Return the best of the beam's prefixes and their extensions."""
        possible = [prefix for prefix in beam if prefix.score > -inf]
        if not extensions:
            return possible
        extensions += [
            (prefix.score, prefix.total, prefix, prefix.token, None) for prefix in possible
        ]
        extensions.sort(key=itemgetter(0), reverse=True)
        return [self._enter(extension) for extension in extensions[: self.settings.beam_size]]

    def _enter(self, extension: Extension) -> Prefix:
        """Return the prefix that an extension leads to: an earlier one, or a new one."""
        score, log_prob, parent, token, arc = extension
        if arc is None:
            return parent
        state, added = self._automaton.state(arc[1]), parent.added + arc[0]
        prefix = parent.children.get(token)
        if prefix is None:
            prefix = parent.children[token] = Prefix((parent.path, token), token, state, added)
        prefix.state, prefix.added = state, added
        prefix.in_blank, prefix.score = -inf, score
        prefix.in_token = prefix.total = log_prob
        return prefix

    def _hypothesis(self, prefix: Prefix) -> Hypothesis:
        added = prefix.added + self._automaton.end(prefix.state.scorer_state)
        return Hypothesis(
            tokens=prefix.tokens(),
            score=prefix.total + added,
            ctc_score=prefix.total,
            lm_score=added,
        )


def log_add(a: float, b: float) -> float:
    """Return ln(exp(a) + exp(b)), where both may be minus infinity."""
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))

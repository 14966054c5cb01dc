"""CTC prefix beam search over one utterance, exact where the beam is not bounded.

Legend: U frames of 40 ms, V vocabulary.

Each prefix carries two probabilities, of the alignments that end in a blank and of those that end
in its last token, after Graves (2012, "Sequence transduction with recurrent neural networks") and
Hannun et al. (2014, arXiv 1408.2873). What the scorers add depends on the prefix alone.
"""

from dataclasses import dataclass, field, replace
from math import exp, inf, log1p
from operator import attrgetter, itemgetter
from typing import NamedTuple

from sbkit.decoding.frames import BeamSettings, Frame, Hypothesis, LogProbs, make_frames
from sbkit.decoding.scorer import NOTHING, Arc, AutomatonState, LazyAutomaton, Scorer

Path = tuple["Path", int] | None
"""The tokens of a prefix: those before the last and the last, None for none."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A token sequence as a node of a tree, with its probabilities after the latest frame.

    token: the last one, -1 for none; added: what the scorers added; in_blank, in_token: ln p of the
    alignments that end so; total: ln of their sum; score: total + added; was_blank, was_total:
    in_blank and total one frame earlier; frame: the number of the latest one at which it was in the
    beam; children: by token, of those that were in the beam once, so that two prefixes are equal
    only where they are one object. It does not refer to its parent, so that a part of the tree that
    no prefix of the beam leads to is freed at once.
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
        path, tokens = self.path, list[int]()
        while path is not None:
            path, token = path
            tokens.append(token)
        return tuple(reversed(tokens))


class BeamState(NamedTuple):
    """Where a search stands: how many frames it has read, and its beam, which changes with it."""

    frames: int
    beam: list[Prefix]

    def copy(self) -> "BeamState":
        """Return a state that stays as it is when this one goes on."""
        made, waiting = dict[int, Prefix](), [*self.beam]
        while waiting:
            each = waiting.pop()
            if id(each) not in made:
                made[id(each)] = replace(each)
                waiting += each.children.values()
        for each in made.values():
            each.children = {token: made[id(child)] for token, child in each.children.items()}
        return BeamState(self.frames, [made[id(each)] for each in self.beam])


Extension = tuple[float, float, Prefix, int, Arc | None]
"""Score, ln p, the prefix, the token appended, and the scorers' arc, None where it stays."""


class PrefixBeamSearch:
    """Find the best token sequences of an utterance, scorers included.

    `decode` takes a whole clip. Frames that come in pieces take `start`, `advance` for each piece
    and `finish`, with the same results however they are cut.
    """

    def __init__(self, *, settings: BeamSettings, scorer: Scorer = NOTHING) -> None:
        self.settings = settings
        self._automaton = LazyAutomaton(scorer)

    def decode(self, log_probs: LogProbs, attention: object = None) -> list[Hypothesis]:
        """Return the beam of natural log-probabilities (U, V), the best hypothesis first."""
        return self.finish(self.advance(self.start(), log_probs))

    def start(self) -> BeamState:
        """Return the state before the first frame."""
        self._automaton.limit()
        root = Prefix(None, -1, self._automaton.start(), 0.0, in_blank=0.0, total=0.0)
        return BeamState(0, [root])

    def advance(self, state: BeamState, log_probs: LogProbs) -> BeamState:
        """Return the state after more frames, natural log-probabilities (U, V).

        The state before is of no use then. Raises SbkitError for another vocabulary and for frames
        without a finite largest value.
        """
        frames = make_frames(log_probs, self.settings)
        beam = state.beam
        for number, frame in enumerate(frames, start=state.frames):
            self._stay(beam, frame, number)
            extensions = self._extend(beam, frame, number) if frame.candidates else []
            beam = self._select(beam, extensions)
        return BeamState(state.frames + len(frames), beam)

    def finish(self, state: BeamState) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        They are distinct; impossible ones are left out. More frames may still follow the state, so
        these may be partial hypotheses.
        """
        hypotheses = map(self._hypothesis, state.beam)
        possible = [each for each in hypotheses if each.score > -inf]
        return sorted(possible, key=attrgetter("score"), reverse=True)

    def _stay(self, beam: list[Prefix], frame: Frame, number: int) -> None:
        """Let each prefix read a blank or its last token again, which leaves it as it is."""
        log_probs, blank = frame.log_probs, frame.log_probs[self.settings.blank]
        for prefix in beam:
            prefix.frame = number
            prefix.was_blank, prefix.was_total = prefix.in_blank, prefix.total
            prefix.in_blank = prefix.total + blank
            if prefix.token >= 0:
                prefix.in_token += log_probs[prefix.token]
            prefix.total = log_add(prefix.in_blank, prefix.in_token)
            prefix.score = prefix.total + prefix.added

    def _extend(self, beam: list[Prefix], frame: Frame, number: int) -> list[Extension]:
        """Append each candidate to each prefix; return those that lead out of the beam.

        What leads to another prefix of the beam is added to it. A repeated token needs a blank
        before it, or it would be merged.
        """
        expand, candidates, extensions = self._automaton.expand, frame.candidates, list[Extension]()
        append, floor = extensions.append, self._floor(beam)
        for prefix in beam:
            last, added = prefix.token, prefix.added
            total, blank = prefix.was_total, prefix.was_blank
            children, state, arcs = prefix.children, prefix.state, prefix.state.arcs
            for token, log_prob in candidates:
                log_prob += blank if token == last else total
                if token in children and (child := children[token]).frame == number:
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
        return min(each.score for each in beam)

    def _select(self, beam: list[Prefix], extensions: list[Extension]) -> list[Prefix]:
        """Return the best of the beam's prefixes and their extensions."""
        room = [each for each in beam if each.score > -inf]
        if not extensions:
            return room
        extensions += [(each.score, each.total, each, each.token, None) for each in room]
        extensions.sort(key=itemgetter(0), reverse=True)
        return [self._enter(each) for each in extensions[: self.settings.beam_size]]

    def _enter(self, extension: Extension) -> Prefix:
        """Return the prefix that an extension leads to: the one that was there, or a new one."""
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
        added = prefix.added + self._automaton.end(prefix.state.of_scorer)
        return Hypothesis(
            tokens=prefix.tokens(),
            score=prefix.total + added,
            ctc_score=prefix.total,
            lm_score=added,
        )


def log_add(one: float, other: float) -> float:
    """Return ln(exp(one) + exp(other)), also of minus infinity."""
    if one < other:
        one, other = other, one
    return one if other == -inf else one + log1p(exp(other - one))

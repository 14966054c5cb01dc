"""CTC prefix beam search over one utterance, exact where the beam is not bounded.

Legend: U frames of 40 ms, V vocabulary.

Each prefix carries two probabilities, of the alignments that end in a blank and of those that end
in its last token, after Graves (2012, "Sequence transduction with recurrent neural networks") and
Hannun et al. (2014, arXiv 1408.2873). What the scorers add depends on the prefix alone.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from math import exp, inf, log1p
from operator import attrgetter, itemgetter

from sbkit.decoding.frames import BeamSettings, Frame, Hypothesis, LogProbs, make_frames
from sbkit.decoding.scorer import NOTHING, Arc, AutomatonState, LazyAutomaton, Scorer


@dataclass(frozen=True, slots=True)
class BeamEntry:
    """A token sequence of the beam between two pieces of the frames.

    tokens: those after the stem; in_blank, in_token: ln of the alignments that end so, total: ln of
    their sum; added: what the scorers added; scorer: their state.
    """

    tokens: tuple[int, ...]
    in_blank: float
    in_token: float
    total: float
    added: float
    scorer: Hashable


@dataclass(frozen=True, slots=True)
class BeamState:
    """Where a search stands after some frames. No method changes it, so it may be kept and shared.

    stem: the tokens that all sequences of the beam begin with, which no later frame changes.
    """

    stem: tuple[int, ...]
    beam: tuple[BeamEntry, ...]


class Prefix:
    """A token sequence as a node of a tree, with its probabilities after the latest frame.

    As in BeamEntry; was_blank, was_total: in_blank and total one frame earlier; score: total +
    added; frame: the latest one at which it was in the beam; children: by token, of those that
    were in the beam once, so that two prefixes are equal only where they are one object.
    """

    __slots__ = (
        "added",
        "children",
        "frame",
        "in_blank",
        "in_token",
        "parent",
        "score",
        "state",
        "token",
        "total",
        "was_blank",
        "was_total",
    )

    def __init__(
        self, parent: "Prefix | None", token: int, state: AutomatonState, added: float
    ) -> None:
        self.parent, self.token, self.state, self.added = parent, token, state, added
        self.in_blank = self.in_token = self.total = self.score = -inf
        self.was_blank = self.was_total = -inf
        self.children = dict[int, Prefix]()
        self.frame = -1

    def release(self) -> None:
        """Break the reference cycles of the tree.

        Python's garbage collector would visit all states of the scorers to find them.
        """
        waiting = [self]
        while waiting:
            prefix = waiting.pop()
            waiting.extend(prefix.children.values())
            prefix.children.clear()

    def tokens(self) -> tuple[int, ...]:
        """Return the tokens from the first to the last."""
        prefix, tokens = self, list[int]()
        while prefix.parent is not None:
            tokens.append(prefix.token)
            prefix = prefix.parent
        return tuple(reversed(tokens))


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

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the beam of natural log-probabilities (U, V), the best hypothesis first."""
        return self.finish(self.advance(self.start(), log_probs))

    def start(self) -> BeamState:
        """Return the state before the first frame."""
        scorer = self._automaton.start().of_scorer
        return BeamState((), (BeamEntry((), 0.0, -inf, 0.0, 0.0, scorer),))

    def advance(self, state: BeamState, log_probs: LogProbs) -> BeamState:
        """Return the state after more frames, natural log-probabilities (U, V).

        Raises SbkitError for another vocabulary and for frames without a finite largest value.
        """
        frames = make_frames(log_probs, self.settings)
        self._automaton.limit()
        root, beam = self._grow(state)
        for place, frame in enumerate(frames):
            self._stay(beam, frame, place)
            extensions = self._extend(beam, frame, place) if frame.candidates else []
            beam = self._select(beam, extensions)
        after = _cut(state.stem, beam)
        root.release()
        return after

    def finish(self, state: BeamState) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        They are distinct; impossible ones are left out. More frames may still follow the state, so
        these may be partial hypotheses.
        """
        hypotheses = [self._hypothesis(state.stem, each) for each in state.beam]
        possible = [each for each in hypotheses if each.score > -inf]
        return sorted(possible, key=attrgetter("score"), reverse=True)

    def _grow(self, state: BeamState) -> tuple[Prefix, list[Prefix]]:
        """Build the tree of a beam, from the node of its stem; return that and the beam.

        Nodes between are built too, so that a sequence that enters the beam again finds those that
        continue it.
        """
        start = self._automaton.start()
        root = Prefix(None, state.stem[-1] if state.stem else -1, start, 0.0)
        beam = list[Prefix]()
        for entry in state.beam:
            prefix = root
            for token in entry.tokens:
                if token not in prefix.children:
                    prefix.children[token] = Prefix(prefix, token, start, 0.0)
                prefix = prefix.children[token]
            prefix.state, prefix.added = self._automaton.state(entry.scorer), entry.added
            prefix.in_blank, prefix.in_token = entry.in_blank, entry.in_token
            prefix.total = entry.total
            beam.append(prefix)
        return root, beam

    def _stay(self, beam: list[Prefix], frame: Frame, place: int) -> None:
        """Let each prefix read a blank or its last token again, which leaves it as it is."""
        log_probs, blank = frame.log_probs, frame.log_probs[self.settings.blank]
        for prefix in beam:
            prefix.frame = place
            prefix.was_blank, prefix.was_total = prefix.in_blank, prefix.total
            prefix.in_blank = prefix.total + blank
            if prefix.token >= 0:
                prefix.in_token += log_probs[prefix.token]
            prefix.total = log_add(prefix.in_blank, prefix.in_token)
            prefix.score = prefix.total + prefix.added

    def _extend(self, beam: list[Prefix], frame: Frame, place: int) -> list[Extension]:
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
                if token in children and (child := children[token]).frame == place:
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
            prefix = parent.children[token] = Prefix(parent, token, state, added)
        prefix.state, prefix.added = state, added
        prefix.in_blank, prefix.score = -inf, score
        prefix.in_token = prefix.total = log_prob
        return prefix

    def _hypothesis(self, stem: tuple[int, ...], entry: BeamEntry) -> Hypothesis:
        added = entry.added + self._automaton.end(entry.scorer)
        return Hypothesis(
            tokens=stem + entry.tokens,
            score=entry.total + added,
            ctc_score=entry.total,
            lm_score=added,
        )


def _cut(stem: tuple[int, ...], beam: list[Prefix]) -> BeamState:
    """Take a beam out of its tree, and lengthen the stem by what its sequences have in common."""
    paths = [prefix.tokens() for prefix in beam]
    ends = zip(min(paths), max(paths), strict=False) if paths else ()  # in alphabetical order
    common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], ends)]
    entries = [
        BeamEntry(
            path[len(common) :],
            each.in_blank,
            each.in_token,
            each.total,
            each.added,
            each.state.of_scorer,
        )
        for path, each in zip(paths, beam, strict=True)
    ]
    return BeamState((*stem, *common), tuple(entries))


def log_add(one: float, other: float) -> float:
    """Return ln(exp(one) + exp(other)), also of minus infinity."""
    if one < other:
        one, other = other, one
    return one if other == -inf else one + log1p(exp(other - one))

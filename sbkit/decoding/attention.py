"""Decode by CTC and the attention decoder of a model together, one utterance at a time.

Legend: N sequences, L tokens, C candidates, U frames of 40 ms, V vocabulary.

The attention decoder rescores hypotheses, or scores them while they are built: joint search
maximizes what rescoring does, ln p of CTC + weighted ln p of the attention decoder + scorers.
Source: Watanabe et al. 2017, "Hybrid CTC/Attention Architecture for End-to-End Speech Recognition",
IEEE JSTSP 11(8), algorithm 2 (the probability of CTC for all that begins with a prefix).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from math import inf
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from sbkit.decoding.frames import BeamSettings, Hypothesis, LogProbs, check_log_probs
from sbkit.decoding.scorer import NOTHING, AutomatonState, LazyAutomaton, Scorer

Tokens = tuple[int, ...]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CANDIDATES = 1.5  # times the beam: tokens of a prefix that CTC scores, the likeliest of attention
HOPELESS = 10.0  # below the best that ended, a prefix is dropped (as in ESPnet)


class AttentionDecoder:
    """Score token sequences of one utterance, each sequence once.

    log_probs: computes ln p of every token after each prefix of a sequence,
    (N, L) -> (N, L + 1, V); eos: what ends a sequence.
    """

    def __init__(self, *, log_probs: Callable[[Counts], Floats], eos: int) -> None:
        self._log_probs, self._eos = log_probs, eos
        self._known = dict[Tokens, float]()

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens and their end | audio) of each sequence."""
        new = [each for each in dict.fromkeys(sequences) if each not in self._known]
        if new:
            self._known |= zip(new, self._score(new), strict=True)
        return [self._known[each] for each in sequences]

    def next_log_probs(self, prefixes: Sequence[Tokens]) -> Floats:
        """Score every next token of prefixes of one length, the end included: -> (N, V)."""
        tokens = np.array(prefixes, dtype=np.int64).reshape(len(prefixes), -1)
        return self._log_probs(tokens)[:, -1]

    def _score(self, sequences: Sequence[Tokens]) -> list[float]:
        lengths = np.array([len(each) for each in sequences])
        wanted = np.full((len(sequences), lengths.max() + 1), self._eos)
        for row, each in zip(wanted, sequences, strict=True):
            row[: len(each)] = each
        log_probs = self._log_probs(wanted[:, :-1])
        of_each = np.take_along_axis(log_probs, wanted[..., None], axis=2)[..., 0]
        counted = np.arange(wanted.shape[1]) <= lengths[:, None]  # the tokens and one end
        totals: list[float] = np.where(counted, of_each, 0.0).sum(1).tolist()
        return totals


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionDecoder, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    if not hypotheses:
        return []
    scores = attention.score([each.tokens for each in hypotheses])
    added = [
        replace(each, score=each.score + weight * score, attention_score=weight * score)
        for each, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(added, key=lambda each: each.score, reverse=True)


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A prefix with its scores.

    attention: ln p of its tokens, weighted; in_token, in_blank: (U + 1,) ln p of CTC's alignments
    of the first frames that end so; added: what the scorers add; score: the sum of all.
    """

    tokens: tuple[int, ...]
    attention: float
    in_token: Floats
    in_blank: Floats
    state: AutomatonState
    added: float
    score: float


class JointBeamSearch:
    """Find the best token sequences of an utterance by CTC, attention and scorers together."""

    def __init__(
        self, *, settings: BeamSettings, weight: float, eos: int, scorer: Scorer = NOTHING
    ) -> None:
        self._settings, self._weight, self._eos = settings, weight, eos
        self._automaton = LazyAutomaton(scorer)
        special = {settings.blank, *settings.excluded}
        self._tokens = np.array(
            [each for each in range(settings.vocab_size) if each not in special]
        )

    def decode(self, log_probs: LogProbs, attention: AttentionDecoder | None) -> list[Hypothesis]:
        """Return the beam of natural log-probabilities (U, V), the best hypothesis first."""
        assert attention is not None  # BeamDecoder requires it
        check_log_probs(log_probs, self._settings.vocab_size)
        ctc = np.asarray(log_probs, np.float64)
        self._automaton.limit()
        beam, ended = [self._root(ctc)], list[Hypothesis]()
        for _ in range(len(ctc) + 1):
            following = attention.next_log_probs([each.tokens for each in beam])
            ended += self._end(beam, following[:, self._eos])
            ended.sort(key=attrgetter("score"), reverse=True)
            longer = [
                each
                for prefix, row in zip(beam, following, strict=True)
                for each in self._extend(prefix, row, ctc)
            ]
            beam = self._best(longer, ended)
            if not beam:
                break
        return ended[: self._settings.beam_size]

    def _root(self, ctc: Floats) -> Partial:
        blanks = np.concatenate([[0.0], np.cumsum(ctc[:, self._settings.blank])])
        nothing = np.full(len(ctc) + 1, -inf)
        return Partial((), 0.0, nothing, blanks, self._automaton.start(), 0.0, 0.0)

    def _end(self, beam: Sequence[Partial], eos: Floats) -> Iterator[Hypothesis]:
        """End each prefix where it is: CTC then has no token in any later frame."""
        for each, log_prob in zip(beam, eos.tolist(), strict=True):
            ctc_score = float(np.logaddexp(each.in_token[-1], each.in_blank[-1]))
            added = each.added + self._automaton.end(each.state.of_scorer)
            said = each.attention + self._weight * log_prob
            if ctc_score > -inf:
                yield Hypothesis(
                    tokens=each.tokens,
                    score=ctc_score + said + added,
                    ctc_score=ctc_score,
                    lm_score=added,
                    attention_score=said,
                )

    def _extend(self, prefix: Partial, following: Floats, ctc: Floats) -> Iterator[Partial]:
        """Append the likeliest tokens of the attention decoder, `CANDIDATES` times the beam."""
        tokens, count = self._tokens, int(CANDIDATES * self._settings.beam_size) + 1
        if len(tokens) > count:
            tokens = tokens[np.argpartition(-following[tokens], count)[:count]]
        in_token, in_blank, ctc_score = extend_ctc(prefix, tokens, ctc, self._settings.blank)
        for place in np.flatnonzero(ctc_score > -inf).tolist():
            token = int(tokens[place])
            arc = prefix.state.arcs.get(token) or self._automaton.expand(prefix.state, token)
            said = prefix.attention + self._weight * float(following[token])
            added = prefix.added + arc[0]
            yield Partial(
                (*prefix.tokens, token),
                said,
                in_token[:, place],
                in_blank[:, place],
                self._automaton.state(arc[1]),
                added,
                float(ctc_score[place]) + said + added,
            )

    def _best(self, partials: list[Partial], ended: Sequence[Hypothesis]) -> list[Partial]:
        kept = nlargest(self._settings.beam_size, partials, key=attrgetter("score"))
        hopeless = ended[0].score - HOPELESS if ended else -inf
        return [each for each in kept if each.score > hopeless]


def extend_ctc(
    prefix: Partial, tokens: npt.NDArray[np.int64], ctc: Floats, blank: int
) -> tuple[Floats, Floats, Floats]:
    """Compute the CTC scores of a prefix with each of some tokens appended: (C,), (U, V).

    The alignments that end in the token and in a blank, 2 x (U + 1, C), and ln p of everything
    that begins so: (C,).
    """
    frames, last = len(ctc), prefix.tokens[-1] if prefix.tokens else -1
    before = np.logaddexp(prefix.in_token, prefix.in_blank)  # (U + 1,)
    repeats = tokens == last  # a repeated token needs a blank before it
    entering = np.where(repeats, prefix.in_blank[:-1, None], before[:-1, None]) + ctc[:, tokens]
    in_token = np.full((frames + 1, len(tokens)), -inf)
    in_blank = np.full((frames + 1, len(tokens)), -inf)
    stay, rest = ctc[:, tokens], ctc[:, blank]
    for frame in range(frames):
        in_token[frame + 1] = np.logaddexp(in_token[frame] + stay[frame], entering[frame])
        in_blank[frame + 1] = np.logaddexp(in_blank[frame], in_token[frame]) + rest[frame]
    ctc_score = np.logaddexp.reduce(entering, axis=0, initial=-inf)
    return in_token, in_blank, ctc_score

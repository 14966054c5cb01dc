"""A word graph, the transducer from CTC labels to scored word sequences, and the search in it.

    H: frames to tokens, as CTC has it
    L: tokens to words, by their spelling; and any other word, by a model of the words' tokens
    G: the n-grams of words

    graph = H o min(det(L o G)), with negative natural logarithms as costs

Labels of frames are tokens + 1, as Kaldi's decoders expect. There are no output labels: the text is
spelled by the tokens of a path, also in unknown words. All weights are in the graph, so that a
decoder needs nothing else.
Source: Mohri, Pereira and Riley 2008, "Speech recognition with weighted finite-state transducers";
Miao, Gowayyed and Metze 2015, arXiv 1507.08240 (the topology of CTC).
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.decoding.frames import BeamSettings, Hypothesis, LogProbs, check_log_probs
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import SPECIAL, UNKNOWN, NgramModel, make_automaton
from sbkit.text.tokenizer import SPACE, Tokenizer

UNKNOWN_ORDER = 3  # n-grams of the tokens in unknown words
MOST_TOKENS = 2000  # the arcs between 1000 take 0.6 GB while it is made, between 1500 1.4 GB
BLOW_UP = 10  # times the states before determinization, beyond which it is given up
BEAM, MOST_ACTIVE = 16.0, 3000  # cost, states of a frame; sherpa-onnx has the same

PACKAGES = ("kaldifst", "kaldi_decoder")
Arc = tuple[int, int, int, int, float]  # source, target, label in, label out, cost


class Marks(NamedTuple):
    """Labels without audio, which tell paths apart until the graph is deterministic.

    backoff: of the model of words; unknown: an unknown word begins; letters: back-off within it.
    """

    backoff: int
    unknown: int
    letters: int


def make_graph(
    *,
    words: NgramModel,
    tokenizer: Tokenizer,
    blank: int,
    scale: float,
    word_bonus: float,
    unknown: float,
) -> Any:
    """Return the graph of a model of words, a kaldifst.StdVectorFst.

    scale: factor of the model's log-probabilities; word_bonus: for each word; unknown: for each
    that it does not know, besides what its tokens cost.

    Raises SbkitError where kaldifst is missing, or the graph is too large.
    """
    fst = require_package("kaldifst", extra="graph")
    if tokenizer.vocab_size > MOST_TOKENS:
        raise SbkitError(
            f"A word graph must have at most {MOST_TOKENS} tokens, because it grows with their "
            f"square, but this tokenizer has {tokenizer.vocab_size}. Take --decoder beam."
        )
    marks = Marks(*range(tokenizer.vocab_size + 1, tokenizer.vocab_size + 4))
    lexicon = LexiconArcs(words, tokenizer, scale, marks)
    lower = _compile(0, lexicon.arcs, [(0, 0.0), (1, 0.0)])
    fst.arcsort(lower, sort_type="olabel")
    upper = _grammar(words, scale, word_bonus, unknown)
    fst.arcsort(upper, sort_type="ilabel")
    spoken = fst.compose(lower, upper)
    _determinize(fst, spoken)
    fst.minimize_encoded(spoken)
    fst.arcsort(spoken, sort_type="ilabel")
    topology = _topology(lexicon.tokens, blank, marks)
    fst.arcsort(topology, sort_type="olabel")
    return fst.compose(topology, spoken)


def _determinize(fst: Any, spoken: Any) -> None:
    before = spoken.num_states
    try:
        is_cut_short = fst.determinize_star(spoken, max_states=BLOW_UP * before + 1000)
    except RuntimeError:  # of Kaldi's checks
        is_cut_short = True
    if is_cut_short:
        raise SbkitError(
            f"A word graph must be determinized within {BLOW_UP} times its {before} states, but "
            "cannot be. Take a language model of a lower order, or --decoder beam."
        )


def _compile(start: int, arcs: Iterable[Arc], finals: Iterable[tuple[int, float]]) -> Any:
    """Make a transducer; OpenFst takes the state that the text begins with as the start."""
    first = sorted(arcs, key=lambda arc: arc[0] != start)
    lines = [f"{a} {b} {label} {out} {cost:.9g}" for a, b, label, out, cost in first]
    lines += [f"{state} {cost:.9g}" for state, cost in finals]
    return require_package("kaldifst", extra="graph").compile("\n".join(lines) + "\n")


# ---- G: labels in are ids of words + 1, and one more for back-off


def _grammar(model: NgramModel, scale: float, word_bonus: float, unknown: float) -> Any:
    made, back = make_automaton(model), len(model.words) + 1
    arcs = list[Arc]()
    for source, target, word, log_prob in made.words:
        score = scale * log_prob + word_bonus + unknown * (word == UNKNOWN)
        arcs.append((source, target, word + 1, 0, -score))
    arcs += [(a, b, back, 0, -scale * weight) for a, b, _, weight in made.backoffs]
    finals = [(source, -scale * weight) for source, _, _, weight in made.ends]
    return _compile(made.start, arcs, finals)


# ---- L: tokens to words; state 0 is before the first word, state 1 after a word


class LexiconArcs:
    """The arcs of L, and the tokens that they have.

    Words lead from both states to state 1, and so does an unknown word: a path of tokens that are
    weighed by n-grams of those that spell the known words.
    """

    def __init__(self, model: NgramModel, tokenizer: Tokenizer, scale: float, marks: Marks) -> None:
        self.arcs, self.tokens = list[Arc](), set[int]()
        self._states = 2
        self._tokenizer, self._scale, self._marks = tokenizer, scale, marks
        known = list(model.words[len(SPECIAL) :])
        for begin in (0, 1):
            self.arcs.append((begin, begin, marks.backoff, len(model.words) + 1, 0.0))
            spelled = {word: self._spell(word, later=begin == 1) for word in known}
            for word, tokens in enumerate(spelled.values(), start=len(SPECIAL)):
                self._add_word(begin, tokens, word + 1)
            self.tokens.update(*spelled.values())
            self._add_unknown(begin, [each for each in spelled.values() if each])

    def _spell(self, word: str, *, later: bool) -> list[int]:
        """Spell a word as the first of a text or a later one; nothing where that cannot be."""
        tokens = list(self._tokenizer.encode(word))
        if later:
            tokens = list(self._tokenizer.encode(f"{word} {word}"))[len(tokens) :]
        return [] if {*self._tokenizer.vocabulary.special} & {*tokens} else tokens

    def _add_word(self, begin: int, tokens: Sequence[int], label: int) -> None:
        source = begin
        for place, token in enumerate(tokens):
            is_last = place == len(tokens) - 1
            target = 1 if is_last else self._states
            self.arcs.append((source, target, token + 1, 0 if place else label, 0.0))
            source, self._states = target, self._states + (not is_last)

    def _add_unknown(self, begin: int, spelled: Sequence[Sequence[int]]) -> None:
        """Add a path for any token sequence that begins as a word and has no second beginning.

        The first of a text may begin with any token that begins no second one, and may be empty.
        """
        model = train((list(map(str, tokens)) for tokens in spelled), order=UNKNOWN_ORDER).model
        made, first, marks = make_automaton(model), self._states, self._marks
        start = first + made.start
        self.arcs.append((begin, start, marks.unknown, UNKNOWN + 1, 0.0))
        for source, target, word, weight in made.words:
            within = first + source != start
            if word == UNKNOWN or (within and self._begins_word(int(model.words[word]))):
                continue
            ends = first + source, first + target
            self.arcs.append((*ends, int(model.words[word]) + 1, 0, -self._scale * weight))
        for source, target, _, weight in made.backoffs:
            if begin == 0 or first + source != start:
                ends = first + source, first + target
                self.arcs.append((*ends, marks.letters, 0, -self._scale * weight))
        for source, _, _, weight in made.ends:
            self.arcs.append((first + source, 1, 0, 0, -self._scale * weight))
        self._states = 1 + max(max(arc[:2]) for arc in self.arcs)

    def _begins_word(self, token: int) -> bool:
        return self._tokenizer.texts[token].startswith(SPACE)


# ---- H: labels in are tokens + 1


def _topology(tokens: Iterable[int], blank: int, marks: Marks) -> Any:
    """Return CTC's topology: a token lasts some frames, and follows itself only after a blank.

    State 0 is the beginning, 1 a blank, and each token has two more: while it lasts, and once marks
    have followed. It cannot last on from the second, so that on no path a label stands on both
    sides of an arc without one: sherpa-onnx would count it twice.
    """
    arcs: list[Arc] = [(0, 0, 0, mark, 0.0) for mark in marks]
    states = {token: 2 * place for place, token in enumerate(tokens, start=1)}
    for source in range(2 + 2 * len(states)):
        arcs.append((source, 1, blank + 1, 0, 0.0))
        for token, state in states.items():
            if source not in (state, state + 1):
                arcs.append((source, state, token + 1, token + 1, 0.0))
    for token, state in states.items():
        arcs.append((state, state, token + 1, 0, 0.0))
        for mark in marks:
            arcs += [(source, state + 1, 0, mark, 0.0) for source in (state, state + 1)]
    return _compile(0, arcs, [(state, 0.0) for state in range(2 + 2 * len(states))])


# ---- the search; U frames of 40 ms, V vocabulary


class GraphSearch:
    """Find the best path through a graph of `make_graph`, in whole clips.

    The score of CTC is that of one alignment. Where the beam has lost every path that ends with a
    word, the best one that does not is taken. Raises SbkitError where kaldi-decoder is missing.
    """

    def __init__(self, *, graph: Any, settings: BeamSettings) -> None:
        self._fst, self._kaldi = (require_package(name, extra="graph") for name in PACKAGES)
        self._options = self._kaldi.FasterDecoderOptions(beam=BEAM, max_active=MOST_ACTIVE)
        self.graph, self._settings = graph, settings

    def decode(self, log_probs: LogProbs, attention: object = None) -> list[Hypothesis]:
        """Return the best hypothesis of natural log-probabilities (U, V), one alone."""
        check_log_probs(log_probs, self._settings.vocab_size)
        if not len(log_probs):
            return [Hypothesis(tokens=(), score=0.0, ctc_score=0.0, lm_score=0.0)]
        rows = np.ascontiguousarray(log_probs, np.float32)
        decoder = self._kaldi.FasterDecoder(self.graph, self._options)  # it keeps its last path
        decoder.decode(self._kaldi.DecodableCtc(rows))
        _, path = decoder.get_best_path()
        _, labels, _, cost = self._fst.get_linear_symbol_sequence(path)
        merged = (label - 1 for label, _ in groupby(labels))
        ctc_score, lm_score = -float(cost.value2), -float(cost.value1)
        return [
            Hypothesis(
                tokens=tuple(token for token in merged if token != self._settings.blank),
                score=ctc_score + lm_score,
                ctc_score=ctc_score,
                lm_score=lm_score,
            )
        ]

"""A decoding graph: the transducer from CTC tokens to scored word sequences, and its decoder.

    H: frames to tokens, by the topology of CTC
    L: tokens to words, by their spelling; and to unknown words, by a model of the words' tokens
    G: words to sentences, by n-grams

    graph = H o min(det(L o G)), with negative natural logarithms as costs

Input labels are tokens + 1, as Kaldi's decoders expect. There are no output labels: the tokens of a
path spell the text, also in unknown words. All weights are in the graph, so that a decoder needs
nothing else.
Source: Mohri, Pereira and Riley 2008, "Speech recognition with weighted finite-state transducers";
Miao, Gowayyed and Metze 2015, arXiv 1507.08240 (the topology of CTC).
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError
from sbkit.base.imports import require_package
from sbkit.decoding.greedy import Hypothesis, check_log_probs
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import SPECIAL, UNKNOWN, NgramModel, make_automaton
from sbkit.text.tokenizer import SPACE, Tokenizer

UNKNOWN_WORD_ORDER = 3  # n-grams of the tokens in unknown words
MAX_TOKENS = 2000  # the arcs between 1000 tokens take 0.6 GB during construction, 1500: 1.4 GB
MAX_GROWTH = 10  # determinization is abandoned beyond this multiple of the states before it
BEAM_COST, MAX_ACTIVE_STATES = 16.0, 3000  # per frame; the values of sherpa-onnx

PACKAGES = ("kaldifst", "kaldi_decoder")
Arc = tuple[int, int, int, int, float]  # source, target, input label, output label, cost


class Marks(NamedTuple):
    """Disambiguation symbols, which distinguish paths until the graph is deterministic.

    backoff: back-off in the model of words; unknown: an unknown word begins; letters: back-off
    within an unknown word.
    """

    backoff: int
    unknown: int
    letters: int


def make_graph(
    *,
    words: NgramModel,
    tokenizer: Tokenizer,
    scale: float,
    word_bonus: float,
    unknown: float,
) -> Any:
    """Build the decoding graph of a model of words, a kaldifst.StdVectorFst.

    scale: factor of the model's log-probabilities; word_bonus: added for each word; unknown: added
    for each unknown word, besides the cost of its tokens.
    Raises ConfigError if the graph would be too large, SbkitError if kaldifst is not installed.
    """
    fst = require_package("kaldifst", extra="graph")
    if tokenizer.vocab_size > MAX_TOKENS:
        raise ConfigError(
            f"A decoding graph supports at most {MAX_TOKENS} tokens, because it grows with their "
            f"square; this tokenizer has {tokenizer.vocab_size}. Use --decoder beam."
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
    topology = _topology(lexicon.tokens, tokenizer.vocabulary.blank, marks)
    fst.arcsort(topology, sort_type="olabel")
    return fst.compose(topology, spoken)


def _determinize(fst: Any, spoken: Any) -> None:
    num_states = spoken.num_states
    try:
        is_cut_short = fst.determinize_star(spoken, max_states=MAX_GROWTH * num_states + 1000)
    except RuntimeError:  # a failed check of Kaldi
        is_cut_short = True
    if is_cut_short:
        raise ConfigError(
            f"The decoding graph of this language model grows beyond {MAX_GROWTH} times its "
            f"{num_states} states. Use a language model of a lower order, or --decoder beam."
        )


def _compile(start: int, arcs: Iterable[Arc], finals: Iterable[tuple[int, float]]) -> Any:
    """Compile a transducer; OpenFst starts at the state that the first line names."""
    from_start_first = sorted(arcs, key=lambda arc: arc[0] != start)
    lines = [f"{a} {b} {label} {out} {cost:.9g}" for a, b, label, out, cost in from_start_first]
    lines += [f"{state} {cost:.9g}" for state, cost in finals]
    return require_package("kaldifst", extra="graph").compile("\n".join(lines) + "\n")


# ---- G: input labels are word ids + 1, and one more for back-off


def _grammar(model: NgramModel, scale: float, word_bonus: float, unknown: float) -> Any:
    automaton, backoff_label = make_automaton(model), len(model.words) + 1
    arcs: list[Arc] = []
    for source, target, word, log_prob in automaton.words:
        score = scale * log_prob + word_bonus + unknown * (word == UNKNOWN)
        arcs.append((source, target, word + 1, 0, -score))
    arcs += [(a, b, backoff_label, 0, -scale * weight) for a, b, _, weight in automaton.backoffs]
    finals = [(source, -scale * weight) for source, _, _, weight in automaton.ends]
    return _compile(automaton.start, arcs, finals)


# ---- L: tokens to words; state 0 is before the first word, state 1 is after a word


class LexiconArcs:
    """The arcs of L, and the tokens on them.

    Words lead from both states to state 1, and so does an unknown word: a path of tokens, weighted
    by n-grams of the tokens that spell the known words.
    """

    def __init__(self, model: NgramModel, tokenizer: Tokenizer, scale: float, marks: Marks) -> None:
        self.arcs: list[Arc] = []
        self.tokens: set[int] = set()
        self._num_states = 2
        self._tokenizer, self._scale, self._marks = tokenizer, scale, marks
        known_words = list(model.words[len(SPECIAL) :])
        for begin in (0, 1):
            self.arcs.append((begin, begin, marks.backoff, len(model.words) + 1, 0.0))
            spellings = [self._spell(word, later=begin == 1) for word in known_words]
            for word, tokens in enumerate(spellings, start=len(SPECIAL)):
                self._add_word(begin, tokens, word + 1)
            self.tokens.update(*spellings)
            self._add_unknown(begin, [tokens for tokens in spellings if tokens])

    def _spell(self, word: str, *, later: bool) -> list[int]:
        """Spell a word as the first of a text or a later one; return [] if tokens are missing."""
        tokens = list(self._tokenizer.encode(word))
        if later:
            tokens = list(self._tokenizer.encode(f"{word} {word}"))[len(tokens) :]
        return [] if {*self._tokenizer.vocabulary.special} & {*tokens} else tokens

    def _add_word(self, begin: int, tokens: Sequence[int], label: int) -> None:
        source = begin
        for index, token in enumerate(tokens):
            is_last = index == len(tokens) - 1
            target = 1 if is_last else self._num_states
            self.arcs.append((source, target, token + 1, 0 if index else label, 0.0))
            source, self._num_states = target, self._num_states + (not is_last)

    def _add_unknown(self, begin: int, spellings: Sequence[Sequence[int]]) -> None:
        """Add a path for any token sequence that begins a word, and only one word.

        The first word of a text need not have a token that begins a word, and may be empty.
        """
        sentences = (list(map(str, tokens)) for tokens in spellings)
        model = train(sentences, order=UNKNOWN_WORD_ORDER).model
        automaton, first, marks = make_automaton(model), self._num_states, self._marks
        start = first + automaton.start
        self.arcs.append((begin, start, marks.unknown, UNKNOWN + 1, 0.0))
        for source, target, word, weight in automaton.words:
            if word == UNKNOWN:
                continue
            token = int(model.words[word])
            begins_word = self._tokenizer.texts[token].startswith(SPACE)
            if first + source == start or not begins_word:
                ends = first + source, first + target
                self.arcs.append((*ends, token + 1, 0, -self._scale * weight))
        for source, target, _, weight in automaton.backoffs:
            if begin == 0 or first + source != start:
                ends = first + source, first + target
                self.arcs.append((*ends, marks.letters, 0, -self._scale * weight))
        for source, _, _, weight in automaton.ends:
            self.arcs.append((first + source, 1, 0, 0, -self._scale * weight))
        self._num_states = 1 + max(max(arc[:2]) for arc in self.arcs)


# ---- H: input labels are tokens + 1


def _topology(tokens: Iterable[int], blank: int, marks: Marks) -> Any:
    """Compile CTC's topology: a token spans some frames, and repeats only after a blank.

    State 0 is the start and state 1 a blank. Each token has two more: one while it lasts, one after
    a mark has followed it. A token cannot continue from the second state. Otherwise a path could
    have the same label on both sides of an arc without one, which sherpa-onnx would count twice.
    """
    arcs: list[Arc] = [(0, 0, 0, mark, 0.0) for mark in marks]
    states = {token: 2 * index for index, token in enumerate(tokens, start=1)}
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


# ---- decoding; U frames of 40 ms, V vocabulary


class GraphDecoder:
    """Find the best path of whole clips through a graph of `make_graph`.

    The CTC score is the score of one alignment. If the beam has lost every path that ends with a
    word, the best path of any end is taken. Raises SbkitError if kaldi-decoder is not installed.
    """

    def __init__(self, *, graph: Any, vocab_size: int, blank: int) -> None:
        self._fst, self._kaldi = (require_package(name, extra="graph") for name in PACKAGES)
        self._options = self._kaldi.FasterDecoderOptions(
            beam=BEAM_COST, max_active=MAX_ACTIVE_STATES
        )
        self.graph, self._vocab_size, self._blank = graph, vocab_size, blank

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the single best hypothesis of natural log-probabilities (U, V)."""
        check_log_probs(log_probs, self._vocab_size)
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
                tokens=tuple(token for token in merged if token != self._blank),
                score=ctc_score + lm_score,
                ctc_score=ctc_score,
                lm_score=lm_score,
            )
        ]

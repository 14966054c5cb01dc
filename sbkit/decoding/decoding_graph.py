"""A decoding graph: the transducer from CTC tokens to scored word sequences, and its decoder.

    H: frames to tokens, by the topology of CTC
    L: tokens to words, by their spelling, and to unknown words, by n-grams of the words' tokens
    G: words to sentences, by n-grams of words

    graph = H o min(det(L o G)), with negative natural logarithms as costs

Input labels are tokens + 1, as Kaldi's decoders expect. There are no output labels, because the
tokens of a path spell the text, even of unknown words. The graph contains all weights, so a decoder
needs nothing else.
Source: Mohri, Pereira and Riley 2008, "Speech recognition with weighted finite-state transducers";
Miao, Gowayyed and Metze 2015, arXiv 1507.08240 (the topology of CTC).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError
from sbkit.base.imports import require_package
from sbkit.decoding.decoder import AttentionScorer, LanguageModelDecoder
from sbkit.decoding.greedy import Hypothesis, check_log_probs, mask_silence, merge_repeats
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import LanguageModels
from sbkit.lm.ngram import SPECIAL, UNKNOWN, NgramModel, make_automaton
from sbkit.text.tokenizer import SPACE, Tokenizer

UNKNOWN_WORD_ORDER = 3  # n-grams of the tokens in unknown words
MAX_TOKENS = 2000  # the arcs between 1000 tokens take 0.6 GB during construction, 1500: 1.4 GB
MAX_GROWTH = 10  # determinization is abandoned beyond this multiple of the states before it
BEAM_COST, MAX_ACTIVE_STATES = 16.0, 3000  # per frame; the values of sherpa-onnx
MAX_TRIAL_NGRAMS = 100_000  # in a graph that tries weights: 4 s to build each

PACKAGES = ("kaldifst", "kaldi_decoder")
Arc = tuple[int, int, int, int, float]  # source, target, input label, output label, cost


class Marks(NamedTuple):
    """Disambiguation symbols, which distinguish paths until the graph is deterministic.

    backoff: back-off in the model of words; unknown: the start of an unknown word; spelling:
    back-off within an unknown word.
    """

    backoff: int
    unknown: int
    spelling: int


def make_graph(
    *,
    word_lm: NgramModel,
    tokenizer: Tokenizer,
    lm_weight: float,
    word_bonus: float,
    unknown_word_score: float,
) -> Any:
    """Build the decoding graph of a model of words, a kaldifst.StdVectorFst.

    lm_weight: factor of the model's log-probabilities; word_bonus: added for each word;
    unknown_word_score: added for each unknown word, besides the cost of its tokens.
    Raises ConfigError if the graph would be too large, SbkitError if kaldifst is not installed.
    """
    kaldifst = require_package("kaldifst", extra="graph")
    if tokenizer.vocab_size > MAX_TOKENS:
        raise ConfigError(
            f"A decoding graph supports at most {MAX_TOKENS} tokens, because it grows with their "
            f"square; this tokenizer has {tokenizer.vocab_size}. Use the decoder beam."
        )
    marks = Marks(*range(tokenizer.vocab_size + 1, tokenizer.vocab_size + 4))
    arcs = LexiconArcs(word_lm, tokenizer, lm_weight, marks)
    lexicon = _compile(0, arcs.arcs, [(0, 0.0), (1, 0.0)])
    kaldifst.arcsort(lexicon, sort_type="olabel")
    grammar = _grammar(word_lm, lm_weight, word_bonus, unknown_word_score)
    kaldifst.arcsort(grammar, sort_type="ilabel")
    sentences = kaldifst.compose(lexicon, grammar)
    num_states = sentences.num_states
    try:
        is_cut_short = kaldifst.determinize_star(
            sentences, max_states=MAX_GROWTH * num_states + 1000
        )
    except RuntimeError:  # a failed check of Kaldi
        is_cut_short = True
    if is_cut_short:
        raise ConfigError(
            f"The decoding graph of this language model grows beyond {MAX_GROWTH} times its "
            f"{num_states} states. Use a language model of a lower order, or the decoder beam."
        )
    kaldifst.minimize_encoded(sentences)
    kaldifst.arcsort(sentences, sort_type="ilabel")
    topology = _topology(arcs.tokens, tokenizer.vocabulary.blank, marks)
    kaldifst.arcsort(topology, sort_type="olabel")
    return kaldifst.compose(topology, sentences)


def _compile(start: int, arcs: Iterable[Arc], finals: Iterable[tuple[int, float]]) -> Any:
    """Compile a transducer; OpenFst starts at the state that the first line names."""
    start_first = sorted(arcs, key=lambda arc: arc[0] != start)
    lines = [
        f"{source} {target} {label} {output} {cost:.9g}"
        for source, target, label, output, cost in start_first
    ]
    lines += [f"{state} {cost:.9g}" for state, cost in finals]
    return require_package("kaldifst", extra="graph").compile("\n".join(lines) + "\n")


# ---- G: input labels are word ids + 1, and one more for back-off


def _grammar(
    model: NgramModel, lm_weight: float, word_bonus: float, unknown_word_score: float
) -> Any:
    automaton = make_automaton(model)
    backoff_label = len(model.words) + 1
    arcs: list[Arc] = []
    for source, target, word, log_prob in automaton.words:
        score = lm_weight * log_prob + word_bonus + unknown_word_score * (word == UNKNOWN)
        arcs.append((source, target, word + 1, 0, -score))
    for source, target, _, log_weight in automaton.backoffs:
        arcs.append((source, target, backoff_label, 0, -lm_weight * log_weight))
    finals = [(source, -lm_weight * log_prob) for source, _, _, log_prob in automaton.ends]
    return _compile(automaton.start, arcs, finals)


# ---- L: tokens to words; state 0 is before the first word, state 1 is after a word


class LexiconArcs:
    """The arcs of L, and the tokens on them.

    Every word leads from states 0 and 1 to state 1. A known word is its spelling. An unknown word
    is any path of tokens, weighted by n-grams of the tokens in known words.
    """

    def __init__(
        self, model: NgramModel, tokenizer: Tokenizer, lm_weight: float, marks: Marks
    ) -> None:
        self.arcs: list[Arc] = []
        self.tokens: set[int] = set()
        self._num_states = 2
        self._tokenizer = tokenizer
        self._lm_weight = lm_weight
        self._marks = marks
        known_words = list(model.words[len(SPECIAL) :])
        for begin in (0, 1):
            self.arcs.append((begin, begin, marks.backoff, len(model.words) + 1, 0.0))
            spellings = [self._spell(word, is_first=begin == 0) for word in known_words]
            for word, tokens in enumerate(spellings, start=len(SPECIAL)):
                self._add_word(begin, tokens, word + 1)
            self.tokens.update(*spellings)
            self._add_unknown(begin, [tokens for tokens in spellings if tokens])

    def _spell(self, word: str, *, is_first: bool) -> list[int]:
        """Spell a word as the first of a text or a later one; return [] if tokens are missing."""
        tokens = list(self._tokenizer.encode(word))
        if not is_first:
            tokens = list(self._tokenizer.encode(f"{word} {word}"))[len(tokens) :]
        return [] if {*self._tokenizer.vocabulary.special} & {*tokens} else tokens

    def _add_word(self, begin: int, tokens: Sequence[int], label: int) -> None:
        source = begin
        for index, token in enumerate(tokens):
            is_last = index == len(tokens) - 1
            target = 1 if is_last else self._num_states
            self.arcs.append((source, target, token + 1, 0 if index else label, 0.0))
            source = target
            self._num_states += not is_last

    def _add_unknown(self, begin: int, spellings: Sequence[Sequence[int]]) -> None:
        """Add a path for any token sequence that begins a word, and only one word.

        The first word of a text need not have a token that begins a word, and may be empty.
        """
        sentences = (list(map(str, tokens)) for tokens in spellings)
        model = train(sentences, order=UNKNOWN_WORD_ORDER).model
        automaton, offset = make_automaton(model), self._num_states  # of the automaton's states
        start = offset + automaton.start
        scale = -self._lm_weight
        self.arcs.append((begin, start, self._marks.unknown, UNKNOWN + 1, 0.0))
        for first, last, word, log_prob in automaton.words:
            if word == UNKNOWN:
                continue
            source = offset + first
            target = offset + last
            token = int(model.words[word])
            begins_word = self._tokenizer.texts[token].startswith(SPACE)
            if source == start or not begins_word:
                self.arcs.append((source, target, token + 1, 0, scale * log_prob))
        for first, last, _, log_weight in automaton.backoffs:
            source = offset + first
            target = offset + last
            if begin == 0 or source != start:
                self.arcs.append((source, target, self._marks.spelling, 0, scale * log_weight))
        for last, _, _, log_prob in automaton.ends:
            self.arcs.append((offset + last, 1, 0, 0, scale * log_prob))
        self._num_states = 1 + max(max(arc[:2]) for arc in self.arcs)


# ---- H: input labels are tokens + 1


def _topology(tokens: Iterable[int], blank: int, marks: Marks) -> Any:
    """Compile CTC's topology: a token spans some frames, and repeats only after a blank.

    State 0 is the start, and state 1 is after a blank. Each token has two states: one while it
    lasts, and one after a mark has followed it. The token cannot continue from the second state.
    Otherwise a path could have the same label on both sides of an arc without a label, and
    sherpa-onnx would count the token twice.
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


# ---- decoding; U frames, V vocabulary


class GraphDecoder(LanguageModelDecoder):
    """Find the best path of whole clips through a graph of `make_graph`.

    The graph is built when it is first needed. It has its own pruning, and uses no model of tokens,
    no hotwords and no attention decoder. The CTC score is the score of one alignment. If the beam
    has lost every path that ends with a word, the best unfinished path is taken.
    """

    decoder_type = "graph"
    # A graph scores a single alignment, and an unknown word costs its tokens.
    weight_ranges = MappingProxyType(
        {"word": (0.5, 1.5), "word_bonus": (-1.0, 2.0), "unknown_word": (-8.0, 1.0)}
    )
    _cached_names = frozenset(("graph",))

    def with_hotwords(self, phrases: Iterable[str]) -> Self:
        """Refuse hotwords."""
        raise ConfigError(
            "Hotwords need the beam decoder, but this model decodes with a graph. Leave the "
            "hotwords out, or fit another decoder: sbkit tune RUN --decoder beam"
        )

    def make_quick(self) -> Self:
        """Return a copy whose language model has only the orders with few n-grams."""
        word_lm = self.language_models.words
        if word_lm is None:
            return self
        sizes = np.cumsum([len(grams) for grams in word_lm.grams])
        num_orders = max(1, int((sizes <= MAX_TRIAL_NGRAMS).sum()))
        shorter = replace(word_lm, grams=word_lm.grams[:num_orders])
        return self.copy_with(language_models=LanguageModels(words=shorter, tokens=None))

    def check(self) -> None:
        """Raise an error if packages are missing, or if the attention decoder should rescore."""
        for name in PACKAGES:
            require_package(name, extra="graph")
        if self.attention_rescoring:
            raise ConfigError(
                "`decoder_type: graph` finds a single hypothesis, so the attention decoder cannot "
                "rescore. Set `attention_rescoring: False`, or `decoder_type: beam`."
            )

    @cached_property
    def graph(self) -> Any:
        """The graph, a kaldifst.StdVectorFst; raises an error if it cannot be built."""
        self.check()
        word_lm = self.language_models.words
        if word_lm is None:
            raise ConfigError(
                "`decoder_type: graph` needs a language model of words, but there is none. Set "
                "`word_lm_order: 3`, or `decoder_type: beam`."
            )
        if word_lm.table is not None:
            raise ConfigError(
                "`decoder_type: graph` writes the words of its language model, but those of this "
                "model have neither case nor punctuation. Train another: sbkit tune RUN --decoder "
                f"graph --word-lm-order {word_lm.order}"
            )
        return make_graph(
            word_lm=word_lm,
            tokenizer=self.tokenizer,
            lm_weight=self.weights.word,
            word_bonus=self.weights.word_bonus,
            unknown_word_score=self.weights.unknown_word,
        )

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        """Return the single best hypothesis of natural log-probabilities (U, V)."""
        check_log_probs(log_probs, self.tokenizer.vocab_size)
        graph = self.graph
        if not len(log_probs):
            return [Hypothesis(tokens=(), score=0.0, ctc_score=0.0)]
        kaldifst, kaldi = (require_package(name, extra="graph") for name in PACKAGES)
        rows = np.ascontiguousarray(mask_silence(log_probs, self.tokenizer.silent), np.float32)
        options = kaldi.FasterDecoderOptions(beam=BEAM_COST, max_active=MAX_ACTIVE_STATES)
        # A new decoder for each clip: it keeps the path of its last one.
        decoder = kaldi.FasterDecoder(graph, options)
        decoder.decode(kaldi.DecodableCtc(rows))
        _, path = decoder.get_best_path()
        _, labels, _, cost = kaldifst.get_linear_symbol_sequence(path)
        best = np.array(labels, np.int64) - 1
        tokens = tuple(merge_repeats(best, self.tokenizer.vocabulary.blank))
        ctc = -float(cost.value2)
        lm = -float(cost.value1)
        return [Hypothesis(tokens=tokens, score=ctc + lm, ctc_score=ctc, lm_score=lm)]

"""CTC prefix beam search over one utterance, exact if the beam is unbounded, and its scorers.

Each prefix has two probabilities: of the alignments that end in a blank, and of the alignments that
end in its last token, after Graves (2012, "Sequence transduction with recurrent neural networks")
and Hannun et al. (2014, arXiv 1408.2873). Scorers, such as language models, add a score that
depends only on the prefix.

The sum over alignments grows with the number of frames in which a token may stand, so in long
silence the tokens that a blank of 0.99 leaves become words. Therefore tokens are appended only near
frames in which greedy decoding hears something, and not where a blank is certain. Skipping blanks
by their probability alone (Wang et al., 2022, arXiv 2210.16481) fails for a model that has learned
little, which is never certain.

Legend: U frames, V vocabulary.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, inf, log1p
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from sbkit.base.arrays import Bools, LogProbs
from sbkit.decoding.greedy import REACH_FRAMES, Hypothesis, check_log_probs, near_speech
from sbkit.lm.ngram import END, NO_HISTORY, UNKNOWN, NgramModel, NgramState
from sbkit.text.tokenizer import SPACE, Tokenizer

MAX_CACHED_STATES = 1 << 17  # each takes 1 to 4 kB with its arcs; with fewer, decoding is slower


# ---- frames


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """How a beam search prunes, and which tokens it may append.

    token_threshold: natural log-probability that a token must exceed to be appended at a frame. The
        best token of a frame is always tried; blanks and repeats always count.
    max_candidates: tokens appended at a frame, the likeliest first; None for no limit.
    excluded: tokens that are never appended, such as `<unk>`.
    silent_ids: tokens without sound. If there are any, a token is appended only where `near_speech`
        finds speech.
    blank_threshold: natural log-probability of the blank above which nothing is appended.
    """

    vocab_size: int
    blank: int = 0
    beam_size: int = 16
    token_threshold: float = -inf
    max_candidates: int | None = None
    excluded: Collection[int] = ()
    silent_ids: Collection[int] = ()
    blank_threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: log_probs (V,) of all tokens; candidates: (token, log-probability) to append."""

    log_probs: list[float]
    candidates: list[tuple[int, float]]


def make_frames(log_probs: LogProbs, is_speech: Bools, settings: BeamSettings) -> list[Frame]:
    """List the candidates of each frame: (U, V), (U,). A frame without speech has none."""
    log_probs = log_probs.astype(np.float64)
    is_open = is_speech & (log_probs[:, settings.blank] <= settings.blank_threshold)
    is_candidate = _find_candidates(log_probs, settings) & is_open[:, None]
    ends = np.cumsum(is_candidate.sum(1))[:-1]
    tokens = [ids.tolist() for ids in np.split(np.nonzero(is_candidate)[1], ends)]
    values = [row.tolist() for row in np.split(log_probs[is_candidate], ends)]
    rows = zip(log_probs.tolist(), tokens, values, strict=False)  # without frames, split makes one
    return [Frame(row, list(zip(*pair, strict=True))) for row, *pair in rows]


def _find_candidates(log_probs: LogProbs, settings: BeamSettings) -> Bools:
    """Return which tokens may be appended: (U, V)."""
    is_allowed = np.ones(settings.vocab_size, dtype=bool)
    is_allowed[[settings.blank, *settings.excluded]] = False
    log_probs = np.where(is_allowed, log_probs, -inf)
    is_candidate: Bools = log_probs > settings.token_threshold
    is_candidate |= log_probs == log_probs.max(1, keepdims=True)
    is_candidate &= log_probs > -inf
    if settings.max_candidates is not None and settings.max_candidates < log_probs.shape[1]:
        allowed = np.where(is_candidate, log_probs, -inf)
        count = settings.max_candidates
        lowest = np.partition(allowed, -count, axis=1)[:, -count]
        is_candidate &= allowed >= lowest[:, None]
    return is_candidate


# ---- scorers


class PrefixScorer(Protocol):
    """A score of token sequences, as a deterministic weighted automaton over tokens.

    Equal states have equal futures.
    """

    def start(self) -> Hashable:
        """Return the state of the empty sequence."""

    def advance(self, state: Any, token: int) -> tuple[float, Hashable]:
        """Return the score of a token after a state, and the state after it."""

    def end(self, state: Any) -> float:
        """Return the score of the end of the audio."""


Arc = tuple[float, tuple[Hashable, ...]]
"""The sum of the scorers for a token, and their states after it."""


@dataclass(eq=False, slots=True)
class AutomatonState:
    """The states of the scorers, and their computed arcs by token."""

    scorer_states: tuple[Hashable, ...]
    arcs: dict[int, Arc] = field(default_factory=dict)


# ---- the search


Path = tuple["Path", int] | None
"""The tokens of a prefix: (the earlier tokens, the last one), None for no tokens."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A token sequence as a node of a tree, with its probabilities after the latest frame.

    Two prefixes are equal only if they are one object. A prefix does not refer to its parent, so
    that branches of the tree without a prefix in the beam are freed at once.

    token: the last token, -1 for none.
    state, added: the state and the sum of the scorers.
    in_blank, in_token: ln p of the alignments that end in a blank, and in the token.
    total: ln of the sum of both; score: total + added.
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
        path = self.path
        tokens = []
        while path is not None:
            path, token = path
            tokens.append(token)
        return tuple(reversed(tokens))


class BeamState(NamedTuple):
    """The state of a search.

    num_frames: the number of decoded frames.
    beam: its prefixes, which are updated in place.
    recent: the latest frames (U, V).
    num_waiting: how many of these are not decoded yet: the next frame may show that they are near
        speech.
    """

    num_frames: int
    beam: list[Prefix]
    recent: LogProbs
    num_waiting: int = 0


Extension = tuple[float, float, Prefix, int, Arc | None]
"""Score, ln p, the prefix, the appended token and its arc, which is None if nothing is appended."""


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

    def __init__(self, *, settings: BeamSettings, scorers: Sequence[PrefixScorer] = ()) -> None:
        self.settings = settings
        self._scorers = tuple(scorers)
        self._states: dict[tuple[Hashable, ...], AutomatonState] = {}  # built when needed

    def decode(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the beam of natural log-probabilities (U, V), the best hypothesis first."""
        return self.finish(self.advance(self.start(), log_probs))

    def score(self, log_probs: LogProbs, tokens: Sequence[int]) -> Hypothesis:
        """Score a token sequence that was found elsewhere: (U, V)."""
        state = self._automaton_state(tuple(scorer.start() for scorer in self._scorers))
        added = 0.0
        for token in tokens:
            price, after = state.arcs.get(token) or self._expand(state, token)
            added += price
            state = self._automaton_state(after)
        pairs = zip(self._scorers, state.scorer_states, strict=True)
        added += sum(scorer.end(scorer_state) for scorer, scorer_state in pairs)
        score = sum_alignments(log_probs, tokens, self.settings.blank) + added
        return Hypothesis(tokens=(*tokens,), score=score)

    def start(self) -> BeamState:
        if len(self._states) > MAX_CACHED_STATES:
            self._states = {}
        state = self._automaton_state(tuple(scorer.start() for scorer in self._scorers))
        root = Prefix(None, -1, state, 0.0, in_blank=0.0, total=0.0)
        return BeamState(0, [root], np.empty((0, self.settings.vocab_size)))

    def advance(self, state: BeamState, log_probs: LogProbs) -> BeamState:
        """Return the state after more frames, natural log-probabilities (U, V).

        The earlier state is no longer valid.
        """
        check_log_probs(log_probs, self.settings.vocab_size)
        recent = np.concatenate([state.recent, log_probs])
        is_speech = near_speech(recent, self.settings.silent_ids)
        num_waiting = int((~is_speech[-REACH_FRAMES:]).sum())
        new = slice(len(state.recent) - state.num_waiting, len(recent) - num_waiting)
        frames = make_frames(recent[new], is_speech[new], self.settings)
        beam = state.beam
        for index, frame in enumerate(frames, start=state.num_frames):
            if frame.candidates:
                self._stay(beam, frame, index)
                beam = self._select(beam, self._extend(beam, frame, index))
            else:
                self._read_silence(beam, max(frame.log_probs))
        num_frames = state.num_frames + len(frames)
        return BeamState(num_frames, beam, recent[-2 * REACH_FRAMES :], num_waiting)

    def finish(self, state: BeamState) -> list[Hypothesis]:
        """Return the hypotheses of a clip that ends here, the best first.

        They are distinct, and impossible ones are left out. The state stays valid, so a stream may
        go on after its partial hypotheses.
        """
        waiting = state.recent[len(state.recent) - state.num_waiting :]
        silence = float(waiting.max(1, initial=-inf).sum())  # no speech follows
        hypotheses: list[Hypothesis] = []
        for prefix in state.beam:
            pairs = zip(self._scorers, prefix.state.scorer_states, strict=True)
            added = prefix.added + sum(scorer.end(s) for scorer, s in pairs)
            if (score := prefix.total + silence + added) > -inf:
                hypotheses.append(Hypothesis(tokens=prefix.tokens(), score=score))
        return sorted(hypotheses, key=attrgetter("score"), reverse=True)

    def _stay(self, beam: list[Prefix], frame: Frame, index: int) -> None:
        """Let each prefix read a blank or its last token again, which does not extend it."""
        log_probs = frame.log_probs
        blank = frame.log_probs[self.settings.blank]
        for prefix in beam:
            prefix.frame = index
            prefix.was_blank, prefix.was_total = prefix.in_blank, prefix.total
            prefix.in_blank = prefix.total + blank
            if prefix.token >= 0:
                prefix.in_token += log_probs[prefix.token]
            prefix.total = log_add(prefix.in_blank, prefix.in_token)
            prefix.score = prefix.total + prefix.added

    def _read_silence(self, beam: list[Prefix], log_prob: float) -> None:
        """Let each prefix read a blank or space; `_stay` updates its score at the next token."""
        for prefix in beam:
            prefix.in_blank = prefix.total = prefix.total + log_prob
            prefix.in_token = -inf

    def _extend(self, beam: list[Prefix], frame: Frame, index: int) -> list[Extension]:
        """Append each candidate to each prefix; return the extensions that are not in the beam.

        If an extension is another prefix of the beam, its probability is added to that prefix. A
        repeated token needs a blank before it, or it would be merged.
        """
        extensions: list[Extension] = []
        expand = self._expand
        candidates = frame.candidates
        append = extensions.append
        # A full beam may stay as it is, so no extension below its worst prefix can enter.
        is_full = len(beam) >= self.settings.beam_size
        floor = min(prefix.score for prefix in beam) if is_full else -inf
        for prefix in beam:
            last, added = prefix.token, prefix.added
            total, blank = prefix.was_total, prefix.was_blank
            children = prefix.children
            state = prefix.state
            arcs = prefix.state.arcs
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

    def _select(self, beam: list[Prefix], extensions: list[Extension]) -> list[Prefix]:
        """Return the best of the beam's prefixes and their extensions."""
        alive = [prefix for prefix in beam if prefix.score > -inf]
        if not extensions:
            return alive
        extensions += [(prefix.score, prefix.total, prefix, prefix.token, None) for prefix in alive]
        extensions.sort(key=itemgetter(0), reverse=True)
        return [self._enter(extension) for extension in extensions[: self.settings.beam_size]]

    def _enter(self, extension: Extension) -> Prefix:
        """Return the prefix of an extension: one that was in the beam before, or a new one."""
        score, log_prob, parent, token, arc = extension
        if arc is None:
            return parent
        state = self._automaton_state(arc[1])
        added = parent.added + arc[0]
        prefix = parent.children.get(token)
        if prefix is None:
            prefix = parent.children[token] = Prefix((parent.path, token), token, state, added)
        prefix.state = state
        prefix.added = added
        prefix.in_blank = -inf
        prefix.score = score
        prefix.in_token = prefix.total = log_prob
        return prefix

    # Cached arcs replace calls of the scorers by a lookup of the token, and a state is hashed only
    # when a prefix enters the beam.
    def _automaton_state(self, scorer_states: tuple[Hashable, ...]) -> AutomatonState:
        state = self._states.get(scorer_states)
        if state is None:
            state = self._states[scorer_states] = AutomatonState(scorer_states)
        return state

    def _expand(self, state: AutomatonState, token: int) -> Arc:
        total = 0.0
        next_states = list[Hashable]()
        for scorer, scorer_state in zip(self._scorers, state.scorer_states, strict=True):
            score, next_state = scorer.advance(scorer_state, token)
            total += score
            next_states.append(next_state)
        arc = state.arcs[token] = total, tuple(next_states)
        return arc


def sum_alignments(log_probs: LogProbs, tokens: Sequence[int], blank: int) -> float:
    """Return ln p(tokens | audio), the sum over all alignments of CTC: (U, V) (Graves et al. 2006).

    >>> frames = np.log(np.array([[0.4, 0.6], [0.5, 0.5]]))
    >>> round(exp(sum_alignments(frames, [1], blank=0)), 3)  # "1 1", "- 1" and "1 -"
    0.8
    """
    states = np.full(2 * len(tokens) + 1, blank)  # a blank before, between and after the tokens
    states[1::2] = tokens
    # A blank between two different tokens may be skipped.
    may_skip = np.zeros(len(states), np.bool_)
    may_skip[3::2] = states[3::2] != states[1:-2:2]
    alphas = np.full(len(states), -inf)
    alphas[0] = 0.0  # before the first frame
    for frame in log_probs:
        advanced = np.concatenate([[-inf], alphas[:-1]])
        skipped = np.where(may_skip, np.concatenate([[-inf, -inf], alphas])[: len(states)], -inf)
        alphas = np.logaddexp(np.logaddexp(alphas, advanced), skipped) + frame[states]
    return float(np.logaddexp.reduce(alphas[-2:]))


def log_add(a: float, b: float) -> float:
    """Return ln(exp(a) + exp(b)), where both may be minus infinity."""
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


# ---- language models as scorers


class TokenScorer:
    """Add lm_weight * ln P(tokens `</s>`) + token_bonus * (number of tokens).

    lm: a model whose words are pieces of the tokenizer, `▁` included; pieces: by token id.
    """

    def __init__(
        self, *, lm: NgramModel, pieces: Sequence[str], lm_weight: float, token_bonus: float
    ) -> None:
        self._lm = lm
        self._lm_weight = lm_weight
        self._token_bonus = token_bonus
        self._ids = [lm.id_of(piece) for piece in pieces]

    def start(self) -> Hashable:
        return self._lm.start

    def advance(self, state: NgramState, token: int) -> tuple[float, Hashable]:
        log_prob, after = self._lm.advance(state, self._ids[token])
        return self._lm_weight * log_prob + self._token_bonus, after

    def end(self, state: NgramState) -> float:
        return self._lm_weight * self._lm.advance(state, END)[0]


@dataclass(eq=False, slots=True)
class LexiconNode:
    """A prefix of words; the root is the lexicon.

    children: by character; best: the highest look-ahead value of the words with this prefix; word:
    the id of the word that is complete here, None if there is none.
    """

    children: dict[str, "LexiconNode"] = field(default_factory=dict)
    best: float = -inf
    word: int | None = None


def extend_lexicon(root: LexiconNode, entries: Iterable[tuple[str, int, float]]) -> LexiconNode:
    """Return a tree with more words; if two words have one spelling, the first counts.

    entries: the characters of a word, its id, and its unigram log-probability, the look-ahead
        value.
    The trees share all nodes that are on no new word's path, so the time depends only on the new
    words, however large the tree is.
    """
    new_root = _copy(root)
    unshared: set[int] = set()  # ids of nodes that belong only to the new tree and may be changed
    for letters, word, value in entries:
        node = new_root
        for letter in letters:
            node.best = max(node.best, value)
            child = node.children.get(letter)
            if child is None or id(child) not in unshared:
                child = node.children[letter] = LexiconNode() if child is None else _copy(child)
                unshared.add(id(child))
            node = child
        node.best = max(node.best, value)
        node.word = word if node.word is None else node.word
    return new_root


def _copy(node: LexiconNode) -> LexiconNode:
    return LexiconNode(dict(node.children), node.best, node.word)


@lru_cache(maxsize=2)  # shared by decoders that differ in their weights
def make_lexicon(lm: NgramModel, tokenizer: Tokenizer) -> LexiconNode:
    """Return the words of a language model that the recognizer can spell, as a tree."""
    spell = tokenizer.spelling if lm.table is None else lm.normalize
    spellings = ((spell(word), lm.id_of(word)) for word in lm.words[END + 1 :])
    entries = [
        (letters, word, lm.advance(NO_HISTORY, word)[0])
        for letters, word in spellings
        if letters and SPACE not in letters
    ]
    return extend_lexicon(LexiconNode(), entries)


def _texts_for(lm: NgramModel, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text of each token in the letters of a model's words; a mark ends a word."""
    if lm.table is None:
        return tokenizer.texts
    # An apostrophe stays between letters. A dot between two single ones would join initials.
    letters = {char: lm.normalize(f"aa{char}aa")[2:-2] for char in {*"".join(tokenizer.texts)}}
    letters[SPACE] = SPACE
    return tuple(
        "".join(letters[char] for char in text).replace(" ", SPACE) for text in tokenizer.texts
    )


WordState = tuple[NgramState, LexiconNode | None]
"""The language model's state, and the lexicon node of the current word: the root between words,
None once a word has left the lexicon and the price of an unknown word is paid."""


class WordScorer:
    """Add lm_weight * ln P(words `</s>`) + word_bonus * words + unknown_word_score * unknown words.

    A partly spelled word pays at once for the best unigram of the words with its prefix; at its
    end, it pays the difference to its own probability (look-ahead, or smearing, after Ortmanns and
    Ney, 2000). A spelling that leaves the lexicon pays for `<unk>` and unknown_word_score at once,
    because paying at its end would fill the beam with nonwords. Added words, such as hotwords, pay
    only for `<unk>`. If the model's words have neither case nor punctuation, tokens count without
    them, so "Line," pays for "line".
    """

    def __init__(
        self,
        *,
        lm: NgramModel,
        lexicon: LexiconNode,
        tokenizer: Tokenizer,
        lm_weight: float,
        word_bonus: float,
        unknown_word_score: float,
        added_words: Iterable[str] = (),
    ) -> None:
        self._lm = lm
        self._texts = _texts_for(lm, tokenizer)
        self._lm_weight = lm_weight
        self._word_bonus = word_bonus
        self._unknown_word_score = unknown_word_score
        value = lm.advance(NO_HISTORY, UNKNOWN)[0]
        spell = tokenizer.spelling if lm.table is None else lm.normalize
        spellings = map(spell, added_words)
        entries = [(letters, UNKNOWN, value) for letters in spellings if letters]
        self._root = extend_lexicon(lexicon, entries)

    def start(self) -> Hashable:
        return self._lm.start, self._root

    def advance(self, state: WordState, token: int) -> tuple[float, Hashable]:
        total = 0.0
        for letter in self._texts[token]:
            score, state = self._close(state) if letter == SPACE else self._spell(state, letter)
            total += score
        return total, state

    def end(self, state: WordState) -> float:
        score, (history, _) = self._close(state)
        return score + self._lm_weight * self._lm.advance(history, END)[0]

    def _spell(self, state: WordState, letter: str) -> tuple[float, WordState]:
        history, node = state
        if node is None:
            return 0.0, state
        child = node.children.get(letter)
        if child is None:
            return self._leave(history, node)
        return self._lookahead(child) - self._lookahead(node), (history, child)

    def _close(self, state: WordState) -> tuple[float, WordState]:
        """End a word; between words, another space changes nothing."""
        history, node = state
        if node is self._root:
            return 0.0, state
        if node is None:
            score = 0.0
        elif node.word is None:
            score, (history, _) = self._leave(history, node)
        else:
            log_prob, history = self._lm.advance(history, node.word)
            score = self._lm_weight * log_prob + self._word_bonus - self._lookahead(node)
        return score, (history, self._root)

    def _leave(self, history: NgramState, node: LexiconNode) -> tuple[float, WordState]:
        """Pay for an unknown word, and take back the look-ahead payment."""
        log_prob, history = self._lm.advance(history, UNKNOWN)
        price = self._lm_weight * log_prob + self._word_bonus + self._unknown_word_score
        return price - self._lookahead(node), (history, None)

    def _lookahead(self, node: LexiconNode) -> float:
        """Return the look-ahead payment for a partly spelled word, nothing between words."""
        if node is self._root:
            return 0.0
        return self._lm_weight * node.best + self._word_bonus

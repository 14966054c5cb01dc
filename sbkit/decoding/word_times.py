"""The words of a decoded text, with times and confidences, the same in a run and in a bundle.

log-probabilities, tokens, beam -> alignment -> features of words -> confidences

Times are from forced alignment: Viterbi over the text with blanks between its tokens. CTC emits a
token in one or two of the frames that it is spoken in, so a word begins before its first token and
ends after its last one: it is extended by offsets that were fitted to data with known times.

A confidence is a logistic function of a word's features, fitted to a validation set (`fit.py`).
Without a fit there is none, because raw posteriors say less than the share of right words does.

Legend: U frames, V vocabulary, L tokens, S = 2 L + 1 states: blank, token, blank, ..., blank;
W words of an utterance; step: samples from one frame to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from sbkit.base.arrays import Bools, Counts, Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.units import frames_needed, samples_to_seconds
from sbkit.decoding.greedy import Hypothesis, mask_silence
from sbkit.evaluate.wer import word_correctness
from sbkit.lm.ngram import UNKNOWN, NgramModel
from sbkit.text.normalization import is_mark
from sbkit.text.recognized_word import Word
from sbkit.text.tokenizer import SPACE, Tokenizer

GREEDY, BEAM = "greedy", "beam"  # the decoders; each has its own confidence
FEATURES = ("entropy", "posterior", "length", "agreement", "known", "lm")
BIAS = "bias"
MAX_WEIGHT = 1e4
TSALLIS_ORDER = 1 / 3  # of the entropy, as in NeMo; flatter than Shannon's
MIN_PROBABILITY = 1e-3  # keeps odds finite; confidences have 3 decimals


# ---- times


@dataclass(frozen=True)
class TimedToken:
    """A token with its first frame and the frame after its last."""

    token: int
    first: int
    end: int
    is_mark: bool = False  # punctuation, which a model writes somewhere in the pause


@dataclass(frozen=True)
class TimedWord:
    """A word and its tokens, with the first frame of its letters and the frame after their last."""

    text: str
    tokens: tuple[TimedToken, ...]

    @property
    def first(self) -> int:
        return self._spoken[0].first

    @property
    def end(self) -> int:
        return self._spoken[-1].end

    @property
    def _spoken(self) -> Sequence[TimedToken]:
        return [token for token in self.tokens if not token.is_mark] or self.tokens


def align(log_probs: LogProbs, tokens: Sequence[int], blank: int) -> list[tuple[int, int]]:
    """Return the first frame of each token and the frame after its last: (U, V) -> L pairs."""
    if not tokens:
        return []
    states = np.full(2 * len(tokens) + 1, blank)
    states[1::2] = tokens
    can_skip = np.zeros(len(states), np.bool_)  # the blank between a token and the one before it
    can_skip[2:] = (states[2:] != blank) & (states[2:] != states[:-2])
    path = _best_path(log_probs[:, states].astype(np.float64), can_skip)
    frames = [np.flatnonzero(path == 2 * index + 1) for index in range(len(tokens))]
    return [(int(span[0]), int(span[-1]) + 1) for span in frames]


def _best_path(scores: Float64s, can_skip: Bools) -> Counts:
    """Return the best state of each frame: (U, S) -> (U,)."""
    num_frames, num_states = scores.shape
    best = np.full(num_states, -np.inf)
    best[0] = 0.0
    steps = np.zeros((num_frames, num_states), np.int8)  # distance to the best previous state
    candidates = np.full((3, num_states), -np.inf)
    for frame in range(num_frames):
        candidates[0] = best
        candidates[1, 1:] = best[:-1]
        candidates[2, 2:] = np.where(can_skip[2:], best[:-2], -np.inf)
        steps[frame] = candidates.argmax(0)
        best = candidates.max(0) + scores[frame]
    state = num_states - 1 if best[-1] >= best[-2] else num_states - 2
    if num_frames == 0 or best[state] == -np.inf:
        raise DataError(
            f"A text of {num_states // 2} tokens cannot be aligned with {num_frames} frames: they "
            "are too few."
        )
    path = np.empty(num_frames, np.int64)
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state -= int(steps[frame, state])
    return path


def time_words(
    log_probs: LogProbs, tokens: Sequence[int], *, pieces: Sequence[str], blank: int
) -> list[TimedWord]:
    """Return the words of a text with their frames; ``pieces``: the written form by token id."""
    words: list[TimedWord] = []
    text = ""
    timed_tokens = list[TimedToken]()
    for token, frames in zip(tokens, align(log_probs, tokens, blank), strict=True):
        timed_token = TimedToken(token, *frames, all(map(is_mark, pieces[token].strip(SPACE))))
        for letter in pieces[token]:
            if letter != SPACE:
                text += letter
                if timed_token not in timed_tokens[-1:]:
                    timed_tokens.append(timed_token)
            elif text:
                words.append(TimedWord(text, tuple(timed_tokens)))
                text = ""
                timed_tokens = []
    return [*words, TimedWord(text, tuple(timed_tokens))] if text else words


@dataclass(frozen=True)
class WordOffsets:
    """How far a word extends beyond its tokens into a pause, in frames.

    start: added to its first frame, usually negative; end: added to the frame after its last.
    """

    start: float = -1.2
    end: float = 3.05

    def to_samples(
        self, words: Sequence[TimedWord], *, samples: int, step: int
    ) -> list[tuple[int, int]]:
        """Return the first sample of each word, and the sample after its last, without overlap."""
        first = np.array([word.first for word in words], np.float64)
        end = np.array([word.end for word in words], np.float64)
        bounds = np.rint(step * self.extend(first, end)).clip(0, samples)
        spans = np.maximum.accumulate(bounds.ravel()).reshape(-1, 2)
        return [(int(start), int(end)) for start, end in spans]

    def extend(self, first: Float64s, end: Float64s) -> Float64s:
        """Return the starts and ends of words in frames, without overlap: (W,), (W,) -> (W, 2)."""
        bounds = np.stack([first + self.start, end + self.end], axis=1)
        overlap = bounds[1:, 0] < bounds[:-1, 1]
        bounds[1:, 0][overlap] = bounds[:-1, 1][overlap] = ((end[:-1] + first[1:]) / 2)[overlap]
        return bounds


# ---- confidences


@dataclass(frozen=True)
class Confidence:
    """A logistic function: bias + sum of weight * feature are the log odds that a word is right."""

    bias: float
    weights: Mapping[str, float]

    @classmethod
    def from_plain(cls, values: Mapping[str, float]) -> Self:
        """Read {bias: ..., FEATURE: ...}; raise LookupError, TypeError or ValueError if invalid."""
        weights = dict(values)
        is_bounded = all(abs(weight) <= MAX_WEIGHT for weight in weights.values())
        if not is_bounded or not weights.keys() <= {BIAS, *FEATURES}:
            raise ValueError(f"a weight is unknown or beyond {MAX_WEIGHT:g}")
        return cls(weights.pop(BIAS), weights)

    def plain(self) -> dict[str, float]:
        return {BIAS: self.bias, **self.weights}

    def __call__(self, features: Mapping[str, Float64s]) -> list[float]:
        """Return the probability that each word is right, 0.001 to 0.999: features (W,) -> W."""
        odds = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        probabilities = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
        clipped = probabilities.clip(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        count = len(next(iter(features.values())))
        rounded: list[float] = np.broadcast_to(clipped, count).round(3).tolist()
        return rounded


@dataclass(frozen=True)
class WordFeatures:
    """The words of an utterance, and their features by name, (W,) each."""

    words: tuple[TimedWord, ...]
    features: dict[str, Float64s]


def features_of_audio(log_probs: LogProbs, words: Sequence[TimedWord]) -> dict[str, Float64s]:
    """Compute the features of words from log-probabilities: (U, V), W words -> (W,) each.

    entropy: mean Tsallis entropy of the tokens over the word's frames, 0 if a token is certain, 1
    if all are equally probable (Laptev and Ginsburg, 2022, arXiv 2212.08703).
    posterior: log odds of the word's least probable token, taking each token at its best frame.
    """
    log_probs = log_probs.astype(np.float64)
    vocab_size = log_probs.shape[1]
    max_entropy = vocab_size ** (1 - TSALLIS_ORDER) - 1
    entropies = (np.exp(TSALLIS_ORDER * log_probs).sum(1) - 1) / max_entropy
    best_log_probs = (
        [log_probs[token.first : token.end, token.token].max() for token in word.tokens]
        for word in words
    )
    weakest = np.exp(np.array([*map(min, best_log_probs)]))
    return {
        "entropy": np.array([entropies[word.first : word.end].mean() for word in words]),
        "posterior": np.log((weakest + MIN_PROBABILITY) / (1 - weakest + MIN_PROBABILITY)),
        "length": np.log([float(len(word.text)) for word in words]),
    }


def agreement(
    words: Sequence[str], beam: Sequence[Sequence[str]], scores: Sequence[float]
) -> Float64s:
    """Return the share of a beam's probability that agrees with each word: -> (W,).

    words: of the best hypothesis; beam: the words of every hypothesis, which are aligned with
    them; scores: natural logarithms. A beam of one agrees with itself.
    """
    if len(beam) < 2:
        return np.ones(len(words))
    shares = np.exp(np.array(scores) - max(scores))
    share_of_text: dict[tuple[str, ...], float] = {}  # hypotheses may differ only in spaces
    for text, share in zip(map(tuple, beam), (shares / shares.sum()).tolist(), strict=True):
        share_of_text[text] = share_of_text.get(text, 0.0) + share
    agreed = np.zeros(len(words))
    for text, share in share_of_text.items():
        agreed += share * np.array(word_correctness(text, words), np.float64)
    return agreed


def features_of_language(lm: NgramModel, words: Sequence[str]) -> dict[str, Float64s]:
    """Compute whether a language model knows each word, and ln P(word | history): -> (W,)."""
    ids = np.array([lm.id_of(word) for word in words], np.int64)
    state = lm.start
    log_probs = np.zeros(len(words))
    for index, word_id in enumerate(ids.tolist()):
        log_probs[index], state = lm.score(state, word_id)
    return {"known": (ids != UNKNOWN).astype(np.float64), "lm": log_probs}


# ---- words with times and confidences


@dataclass(frozen=True, kw_only=True)
class WordAligner:
    """Compute the times and confidences of a text's words from the frames of a whole clip.

    hotwords: words that get no confidence, because the confidence was fitted to words that were
        decoded without hotwords.
    """

    tokenizer: Tokenizer
    samples_per_frame: int
    sample_rate: int
    offsets: WordOffsets = field(default_factory=WordOffsets)
    word_lm: NgramModel | None = None
    confidence: Confidence | None = None
    hotwords: frozenset[str] = frozenset()

    def align(
        self,
        log_probs: LogProbs,
        tokens: Sequence[int],
        beam: Sequence[Hypothesis] = (),
        *,
        samples: int,
    ) -> tuple[Word, ...]:
        """Return the words that tokens spell, with times and confidences: (U, V), L tokens.

        beam: of the decoder that wrote the tokens; none for another text, such as a reference.
        """
        if self.confidence is None:
            return self._in_seconds(self._align(log_probs, tokens, beam), samples)
        extracted = self.extract_features(log_probs, tokens, beam)
        words = self._in_seconds(extracted.words, samples)
        marks = "".join(self.tokenizer.marks)
        return tuple(
            word
            if self.hotwords & {word.text, word.text.strip(marks)}
            else replace(word, confidence=confidence)
            for word, confidence in zip(words, self.confidence(extracted.features), strict=True)
        )

    def extract_features(
        self, log_probs: LogProbs, tokens: Sequence[int], beam: Sequence[Hypothesis] = ()
    ) -> WordFeatures:
        words = self._align(log_probs, tokens, beam)
        texts = [word.text for word in words]
        features = features_of_audio(log_probs, words)
        features["agreement"] = agreement(
            texts,
            [self.tokenizer.words(hypothesis.tokens) for hypothesis in beam],
            [hypothesis.score for hypothesis in beam],
        )
        if self.word_lm is not None:
            features |= features_of_language(self.word_lm, texts)
        return WordFeatures(words, features)

    def _align(
        self, log_probs: LogProbs, tokens: Sequence[int], beam: Sequence[Hypothesis]
    ) -> tuple[TimedWord, ...]:
        """Align the tokenizer's own spelling of the text, if the frames can hold it.

        Thus a text has the same times whichever decoder wrote it. A decoded word is not where
        greedy decoding hears nothing.
        """
        spelling = np.array(self.tokenizer.encode(self.tokenizer.decode(list(tokens))), np.int64)
        if frames_needed(spelling, np.array([len(spelling)]))[0] <= len(log_probs):
            tokens = spelling.tolist()
        blank = self.tokenizer.vocabulary.blank
        pieces = self.tokenizer.texts
        if beam:
            log_probs = mask_silence(log_probs, self.tokenizer.silent)
        return tuple(time_words(log_probs, tokens, pieces=pieces, blank=blank))

    def _in_seconds(self, words: Sequence[TimedWord], samples: int) -> tuple[Word, ...]:
        spans = self.offsets.to_samples(words, samples=samples, step=self.samples_per_frame)
        return tuple(
            Word(word.text, *(samples_to_seconds(sample, self.sample_rate) for sample in span))
            for word, span in zip(words, spans, strict=True)
        )

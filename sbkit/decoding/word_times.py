"""The words of a decoded text, with times and confidences, the same in a run and in a bundle.

log-probabilities, tokens -> alignment -> features of words -> confidences

Times are from forced alignment: Viterbi over the text with blanks between its tokens. CTC emits a
token in only one or two of the frames where it is spoken, so a word begins before its first token
and ends after its last one. Offsets that were fitted to data with known times extend it.

A confidence is a logistic function of a word's features, fitted to a validation set (`fit.py`).
Without a fit there is none, because a raw posterior is not the probability that a word is right.

Legend: U frames, V vocabulary, L tokens, S = 2 L + 1 states: blank, token, blank, ..., blank;
W words of an utterance; frame_samples: from one frame to the next.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Counts, Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.units import frames_needed, samples_to_seconds
from sbkit.decoding.greedy import mask_silence
from sbkit.lm.ngram import NO_HISTORY, UNKNOWN, NgramModel
from sbkit.text.normalization import is_mark
from sbkit.text.recognized_word import Word
from sbkit.text.tokenizer import SPACE, Tokenizer

GREEDY, BEAM = "greedy", "beam"  # the decoders; each has its own confidence
MAX_CONFIDENCE_WEIGHT = 1e4
LETTER_LOG_PROB = -3.0  # of each letter of an unknown word: about 1 of 20
MIN_PROBABILITY = 1e-3  # keeps odds finite; confidences have 3 decimals


# ---- times


@dataclass(frozen=True)
class TimedToken:
    """The first frame of a token and the frame after its last."""

    first: int
    end: int
    posterior: float  # of its best frame
    is_mark: bool = False  # punctuation, which a model writes somewhere in the pause


@dataclass(frozen=True)
class TimedWord:
    """A word and its tokens, with the first frame of its letters and the frame after their last."""

    text: str
    tokens: tuple[TimedToken, ...]

    @property
    def first(self) -> int:
        return self._letter_tokens[0].first

    @property
    def end(self) -> int:
        return self._letter_tokens[-1].end

    @property
    def posterior(self) -> float:
        """The posterior of the least probable token; one wrong letter hardly lowers a mean."""
        return min(token.posterior for token in self.tokens)

    @property
    def _letter_tokens(self) -> Sequence[TimedToken]:
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


def _best_path(log_probs: Float64s, can_skip: Bools) -> Counts:
    """Return the best state of each frame: (U, S) -> (U,)."""
    num_frames, num_states = log_probs.shape
    best = np.full(num_states, -np.inf)
    best[0] = 0.0
    moves = np.zeros((num_frames, num_states), np.int8)  # distance to the best previous state
    candidates = np.full((3, num_states), -np.inf)
    for frame in range(num_frames):
        candidates[0] = best
        candidates[1, 1:] = best[:-1]
        candidates[2, 2:] = np.where(can_skip[2:], best[:-2], -np.inf)
        moves[frame] = candidates.argmax(0)
        best = candidates.max(0) + log_probs[frame]
    state = num_states - 1 if best[-1] >= best[-2] else num_states - 2
    if num_frames == 0 or best[state] == -np.inf:
        raise DataError(
            f"A text of {num_states // 2} tokens cannot be aligned with {num_frames} frames: they "
            "are too few."
        )
    path = np.empty(num_frames, np.int64)
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state -= int(moves[frame, state])
    return path


def time_words(
    log_probs: LogProbs, tokens: Sequence[int], *, pieces: Sequence[str], blank: int
) -> list[TimedWord]:
    """Return the words of a text with their frames.

    pieces: the written form of each token, by id.
    """
    words: list[TimedWord] = []
    text = ""
    timed_tokens = list[TimedToken]()
    for token, (first, end) in zip(tokens, align(log_probs, tokens, blank), strict=True):
        posterior = float(np.exp(log_probs[first:end, token].max()))
        is_a_mark = all(map(is_mark, pieces[token].strip(SPACE)))
        timed_token = TimedToken(first, end, posterior, is_a_mark)
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
        self, words: Sequence[TimedWord], *, samples: int, frame_samples: int
    ) -> list[tuple[int, int]]:
        """Return the first sample of each word, and the sample after its last, without overlap."""
        first = np.array([word.first for word in words], np.float64)
        end = np.array([word.end for word in words], np.float64)
        bounds = np.rint(frame_samples * self.extend(first, end)).clip(0, samples)
        spans = np.maximum.accumulate(bounds.ravel()).reshape(-1, 2)
        return [(int(start), int(end)) for start, end in spans]

    def extend(self, first: Float64s, end: Float64s) -> Float64s:
        """Return the starts and ends of words in frames, without overlap: (W,), (W,) -> (W, 2)."""
        bounds = np.stack([first + self.start, end + self.end], axis=1)
        overlap = bounds[1:, 0] < bounds[:-1, 1]
        bounds[1:, 0][overlap] = bounds[:-1, 1][overlap] = ((end[:-1] + first[1:]) / 2)[overlap]
        return bounds


# ---- confidences


def log_odds(probability: float) -> float:
    """Return the logarithm of p / (1 - p), finite also for 0 and 1."""
    return math.log((probability + MIN_PROBABILITY) / (1 - probability + MIN_PROBABILITY))


class WordFeatures(NamedTuple):
    """Features that tell right words from wrong ones.

    posterior: the log odds of the word's least probable token, each token at its best frame.
    length: ln of its number of letters.
    lm: ln P(word | history) by the language model of words, also over the letters of an unknown
        word; 0 without a model.
    """

    posterior: float
    length: float
    lm: float


def word_features(words: Sequence[TimedWord], lm: NgramModel | None) -> list[WordFeatures]:
    """Compute the features of the words of a text."""
    features: list[WordFeatures] = []
    state = NO_HISTORY if lm is None else lm.start
    for word in words:
        log_prob = 0.0
        if lm is not None:
            word_id = lm.id_of(word.text)
            log_prob, state = lm.advance(state, word_id)
            if word_id == UNKNOWN:
                log_prob += LETTER_LOG_PROB * len(word.text)
        features.append(WordFeatures(log_odds(word.posterior), math.log(len(word.text)), log_prob))
    return features


@dataclass(frozen=True)
class Confidence:
    """A logistic function: bias + sum of weight * feature are the log odds that a word is right."""

    bias: float
    posterior: float
    length: float
    lm: float

    def __post_init__(self) -> None:
        if not all(abs(weight) <= MAX_CONFIDENCE_WEIGHT for weight in astuple(self)):
            raise ValueError(f"a confidence has a weight beyond {MAX_CONFIDENCE_WEIGHT:g}")

    def __call__(self, features: WordFeatures) -> float:
        """Return the probability that a word is right, 0.001 to 0.999."""
        terms = zip(astuple(self), (1.0, *features), strict=True)
        log_odds_of_word = sum(weight * feature for weight, feature in terms)
        probability = (1 + math.tanh(log_odds_of_word / 2)) / 2
        return round(min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY), 3)


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
        self, log_probs: LogProbs, tokens: Sequence[int], *, samples: int, is_decoded: bool = False
    ) -> tuple[Word, ...]:
        """Return the words that tokens spell, with times: (U, V), L tokens.

        is_decoded: whether the tokens are from the decoder to which the confidence was fitted;
            words from elsewhere get no confidence.
        """
        timed_words = self.find_frames(log_probs, tokens, is_decoded=is_decoded)
        spans = self.offsets.to_samples(
            timed_words, samples=samples, frame_samples=self.samples_per_frame
        )
        words = tuple(
            Word(word.text, *(samples_to_seconds(sample, self.sample_rate) for sample in span))
            for word, span in zip(timed_words, spans, strict=True)
        )
        if self.confidence is None or not is_decoded:
            return words
        features_of_words = word_features(timed_words, self.word_lm)
        marks = "".join(self.tokenizer.marks)
        return tuple(
            word
            if self.hotwords & {word.text, word.text.strip(marks)}
            else replace(word, confidence=self.confidence(features))
            for word, features in zip(words, features_of_words, strict=True)
        )

    def find_frames(
        self, log_probs: LogProbs, tokens: Sequence[int], *, is_decoded: bool
    ) -> list[TimedWord]:
        """Align the tokenizer's own spelling of the text, if the frames can hold it.

        Thus a text has the same times whichever decoder wrote it. Decoded words are kept out of
        frames where greedy decoding finds no speech.
        """
        spelling = np.array(self.tokenizer.encode(self.tokenizer.decode(list(tokens))), np.int64)
        if frames_needed(spelling, np.array([len(spelling)]))[0] <= len(log_probs):
            tokens = spelling.tolist()
        if is_decoded:
            log_probs = mask_silence(log_probs, self.tokenizer.silent_ids)
        blank = self.tokenizer.vocabulary.blank
        return time_words(log_probs, tokens, pieces=self.tokenizer.texts, blank=blank)

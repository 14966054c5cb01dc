"""The times and confidences of decoded words, the same in a run and in a bundle.

log-probabilities, tokens, beam -> alignment -> features of words -> confidences

Legend: U frames, V vocabulary, W words of an utterance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sbkit.base.units import samples_to_seconds
from sbkit.decoding.alignment import TimedWord, WordOffsets, frames_needed, time_words
from sbkit.decoding.confidence import (
    Confidence,
    WordFeatures,
    agreement,
    features_of_audio,
    features_of_language,
)
from sbkit.decoding.frames import Hypothesis, LogProbs
from sbkit.decoding.spelling import Spelling
from sbkit.lm.ngram import NgramModel
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word


@dataclass(frozen=True, kw_only=True)
class WordAligner:
    """Compute the times and confidences of the words of a text, from the frames of a whole clip.

    Attributes:
        samples_per_frame, sample_rate: from frames to seconds.
        offsets: how far words reach beyond the frames of their tokens.
        lm: a language model of words, None for none.
        confidence: None where there is none.
        unjudged: words without a confidence, since none like them were in what it was fitted on:
            hotwords.
    """

    tokenizer: Tokenizer
    samples_per_frame: int
    sample_rate: int
    offsets: WordOffsets = field(default_factory=WordOffsets)
    lm: NgramModel | None = None
    confidence: Confidence | None = None
    unjudged: frozenset[str] = frozenset()

    def align(
        self,
        log_probs: LogProbs,
        tokens: Sequence[int],
        beam: Sequence[Hypothesis] = (),
        *,
        samples: int,
    ) -> tuple[Word, ...]:
        """Align tokens with log-probabilities (U, V), and compute the confidence of their words.

        No word leaves the clip, of so many samples.
        """
        if self.confidence is None:
            return self._in_seconds(self._align(log_probs, tokens), samples)
        extracted = self.extract_features(log_probs, tokens, beam)
        confidences = self.confidence(extracted.features)
        words = self._in_seconds(extracted.words, samples)
        return tuple(
            word if word.text in self.unjudged else replace(word, confidence=confidence)
            for word, confidence in zip(words, confidences, strict=True)
        )

    def extract_features(
        self, log_probs: LogProbs, tokens: Sequence[int], beam: Sequence[Hypothesis] = ()
    ) -> WordFeatures:
        """Align tokens with log-probabilities (U, V), and compute the features of their words."""
        words = self._align(log_probs, tokens)
        texts = [word.text for word in words]
        features = features_of_audio(log_probs, words)
        features["agreement"] = agreement(
            texts,
            [self._spelling.words(each.tokens) for each in beam],
            [each.score for each in beam],
        )
        if self.lm is not None:
            features |= features_of_language(self.lm, texts)
        return WordFeatures(words, features)

    def _align(self, log_probs: LogProbs, tokens: Sequence[int]) -> tuple[TimedWord, ...]:
        """Align the tokenizer's own spelling of the text, where the frames can hold it.

        So one text has the same times whichever decoder wrote it.
        """
        spelled = self.tokenizer.encode(self.tokenizer.decode(list(tokens)))
        tokens = spelled if frames_needed(spelled) <= len(log_probs) else tokens
        blank, pieces = self.tokenizer.vocabulary.blank, self._spelling.texts
        return tuple(time_words(log_probs, tokens, pieces=pieces, blank=blank))

    def _in_seconds(self, words: Sequence[TimedWord], samples: int) -> tuple[Word, ...]:
        spans = self.offsets.place(words, samples=samples, step=self.samples_per_frame)
        return tuple(
            Word(word.text, *(samples_to_seconds(each, self.sample_rate) for each in span))
            for word, span in zip(words, spans, strict=True)
        )

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self.tokenizer)

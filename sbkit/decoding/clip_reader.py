"""From what a model heard in a clip to its text, and its words in time."""

from collections.abc import Sequence
from dataclasses import dataclass

from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.decoder import BeamDecoder, best_tokens
from sbkit.decoding.frames import Hypothesis, LogProbs, check_log_probs
from sbkit.decoding.word_reader import WordReader
from sbkit.text.word import Word


@dataclass(frozen=True)
class Recognized:
    """What is said in a clip, and its words in time where they were asked for."""

    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class ClipReader:
    """Decode clips; it has nothing of a model, so that it can be sent to other processes.

    decoder: None where the best token of each frame is taken; words: what times and judges words.
    """

    decoder: BeamDecoder | None
    words: WordReader

    def read(
        self,
        log_probs: LogProbs,
        *,
        samples: int,
        times: bool = False,
        attention: AttentionDecoder | None = None,
    ) -> Recognized:
        """Decode the log-probabilities (U, V) of a clip of so many samples.

        attention: the attention decoder of the clip, for a decoder that asks it.
        """
        tokens, beam = self._decode(log_probs, attention)
        text = self.words.tokenizer.decode(tokens)
        if not times:
            return Recognized(text)
        return Recognized(text, self.words.read(log_probs, tokens, beam, samples=samples))

    def _decode(
        self, log_probs: LogProbs, attention: AttentionDecoder | None
    ) -> tuple[list[int], Sequence[Hypothesis]]:
        if self.decoder is None:
            vocabulary = self.words.tokenizer.vocabulary
            check_log_probs(log_probs, vocabulary.size)
            return best_tokens(log_probs, vocabulary.blank), ()
        beam = self.decoder.nbest(log_probs, attention)
        return list(beam[0].tokens), beam

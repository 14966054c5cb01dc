"""From the log-probabilities of a clip to its text, and its words with times and confidences."""

from dataclasses import dataclass

from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.greedy import GreedySearch
from sbkit.decoding.word_aligner import WordAligner
from sbkit.text.word import Word


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderInput:
    """The output of a model for a clip.

    log_probs: (U, V); samples: of the clip; begin: where it begins in the audio that it is cut
    from, in seconds; attention: its attention decoder, for a search that uses it.
    """

    log_probs: LogProbs
    samples: int
    begin: float = 0.0
    attention: AttentionDecoder | None = None


@dataclass(frozen=True)
class Recognized:
    """The text of a clip, and its words with times on request."""

    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class CtcDecoder:
    """Decode clips by a search, and align their words.

    It holds nothing of a model, so that it can be sent to other processes.
    """

    search: BeamDecoder | GreedySearch
    aligner: WordAligner

    @classmethod
    def of(cls, search: BeamDecoder | None, aligner: WordAligner) -> "CtcDecoder":
        """Return the decoder of a search, or a greedy one without."""
        vocabulary = aligner.tokenizer.vocabulary
        greedy = GreedySearch(vocab_size=vocabulary.size, blank=vocabulary.blank)
        return cls(search or greedy, aligner)

    @property
    def is_python(self) -> bool:
        """Check whether it searches in Python, and so in one thread alone, without a model."""
        search = self.search
        return isinstance(search, BeamDecoder) and search.kind == "beam" and not search.attention

    def decode(self, clip: DecoderInput, *, times: bool) -> Recognized:
        """Decode a clip; times count from the begin of the audio that it is cut from."""
        beam = self.search.nbest(clip.log_probs, clip.attention)
        tokens = list(beam[0].tokens)
        text = self.aligner.tokenizer.decode(tokens)
        if not times:
            return Recognized(text)
        words = self.aligner.align(clip.log_probs, tokens, beam, samples=clip.samples)
        return Recognized(text, tuple(word.later(clip.begin) for word in words))

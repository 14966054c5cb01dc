"""Decoders: what turns the log-probabilities of CTC into tokens.

Legend: B utterances, U frames of 40 ms, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, reduce
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import AT_LEAST_ONE
from sbkit.decoding.hotwords import HotwordScorer
from sbkit.decoding.hypothesis import Hypothesis
from sbkit.decoding.language_models import LanguageModels, load_language_models
from sbkit.decoding.prefix_beam import LogProbs, NoScorer, PrefixBeam, Scorer
from sbkit.decoding.sum_scorer import SumScorer
from sbkit.decoding.word_scorer import TokenScorer, WordScorer
from sbkit.lm.ngram import UNKNOWN, NgramModel
from sbkit.text.tokenizer import Tokenizer

HOTWORD_REWARD = 8.0  # for a phrase; CHANGELOG has the figures of 6, 8 and 10
DECODER_FILE, LANGUAGE_MODELS = "decoder.json", "lm.safetensors"  # in a run and in a bundle


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the language models weigh beside CTC.

    Attributes:
        word, token: factors of the log-probabilities of words and of tokens.
        word_bonus, token_bonus: for each word and each token.
        unknown: for each word that the model of words does not know.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5

    @classmethod
    def of(cls, values: object) -> Self:
        """Read weights from plain data; raises SbkitError where they are none."""
        names = [field.name for field in fields(cls)]
        good = isinstance(values, Mapping) and all(
            name in names and isinstance(value, int | float) and abs(value) < 1e3
            for name, value in values.items()
        )
        if not good:
            raise SbkitError(
                f"The weights of a decoder must be numbers named {', '.join(names)}, but are "
                f"{str(values)[:100]}. Correct them, or write null to have them chosen."
            )
        return cls(**{str(name): float(value) for name, value in dict(values).items()})  # type: ignore[call-overload]

    def plain(self) -> dict[str, float]:
        """Return them as plain data."""
        return asdict(self)


class BeamDecoder:
    """Prefix beam search with the language models of a run.

    ``weights`` are chosen on the validation set at the end of training where they are null.
    """

    RANGES: ClassVar = {"beam_size": AT_LEAST_ONE}

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        language_models: str | Path | LanguageModels,
        beam_size: int = 16,
        weights: Mapping[str, float] | Weights | None = None,
        hotwords: Sequence[str] = (),
        hotword_reward: float = HOTWORD_REWARD,
    ) -> None:
        self.tokenizer, self.beam_size = tokenizer, beam_size
        self._hotwords: HotwordScorer | None = None
        self._without: BeamDecoder | None = None
        if hotwords:
            self._hotwords = HotwordScorer(
                phrases=hotwords, pieces=tokenizer.pieces(), reward=hotword_reward
            )
        self._source = language_models
        self.is_open = weights is None  # its weights are to be chosen
        given = Weights() if weights is None else weights
        self.weights = given if isinstance(given, Weights) else Weights.of(given)

    @cached_property
    def language_models(self) -> LanguageModels:
        """Load the language models when they are needed first."""
        if isinstance(self._source, LanguageModels):
            return self._source
        return load_language_models(Path(self._source), self.tokenizer)

    def with_weights(self, weights: Weights) -> "BeamDecoder":
        """Return the same decoder with other weights."""
        return BeamDecoder(
            tokenizer=self.tokenizer,
            language_models=self.language_models,
            beam_size=self.beam_size,
            weights=weights,
        )

    def with_hotwords(
        self, phrases: Sequence[str], reward: float = HOTWORD_REWARD
    ) -> "BeamDecoder":
        """Return the same decoder, which expects some phrases; normalized ones, as `Hotwords`."""
        decoder = BeamDecoder(
            tokenizer=self.tokenizer,
            language_models=self.language_models,
            beam_size=self.beam_size,
            weights=self.weights,
            hotwords=phrases,
            hotword_reward=reward,
        )
        decoder._without = self
        return decoder

    @cached_property
    def beam(self) -> PrefixBeam:
        """Make the search."""
        special = self.tokenizer.vocabulary
        return PrefixBeam(
            scorer=self._scorer(),
            blank=special.blank,
            skip=frozenset({special.unk, special.bos, special.eos}),
            beam_size=self.beam_size,
        )

    def _scorer(self) -> Scorer:
        pieces, models, weights = self.tokenizer.pieces(), self.language_models, self.weights
        scorers: list[Scorer] = [] if self._hotwords is None else [self._hotwords]
        if models.words is not None and weights.word:
            scorers.append(
                WordScorer(
                    model=models.words,
                    pieces=pieces,
                    weight=weights.word,
                    bonus=weights.word_bonus,
                    unknown=weights.unknown,
                    more_words=self._more_words(models.words),
                )
            )
        if models.tokens is not None and weights.token:
            scorers.append(
                TokenScorer(
                    model=models.tokens,
                    pieces=pieces,
                    weight=weights.token,
                    bonus=weights.token_bonus,
                )
            )
        return reduce(SumScorer, scorers) if scorers else NoScorer()

    def _more_words(self, model: NgramModel) -> list[str]:
        """List the words of hotwords that the model does not know."""
        phrases = () if self._hotwords is None else self._hotwords.phrases
        words = dict.fromkeys(word for phrase in phrases for word in phrase.split())
        return [word for word in words if model.id_of(word) == UNKNOWN]

    def nbest(self, log_probs: LogProbs, count: int) -> list[Hypothesis]:
        """Return the best hypotheses of an utterance, (U, V), the best first."""
        return self.beam.decode(log_probs, nbest=count)

    def decode(self, log_probs: Tensor, frame_lengths: Tensor) -> list[list[int]]:
        """Return the tokens of each utterance: (B, U, V), (B,) -> ids."""
        rows = zip(log_probs.float().cpu().numpy(), frame_lengths.tolist(), strict=True)
        return [self._best(row[:frames]) for row, frames in rows]

    def _best(self, log_probs: LogProbs) -> list[int]:
        """Decode one utterance: with hotwords only where one of them is then heard.

        So a list of what is not said leaves every transcript as it is.
        """
        best = list(self.beam.decode(log_probs)[0].tokens)
        if self._without is None or self._hotwords is None:
            return best
        plain = self._without._best(log_probs)
        heard, without = (
            self._hotwords.count(self.tokenizer.decode(tokens)) for tokens in (best, plain)
        )
        return best if heard > without else plain

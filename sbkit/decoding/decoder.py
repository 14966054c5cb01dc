"""Decoders: what turns the log-probabilities of CTC into tokens.

Legend: B utterances, U frames of 40 ms, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import AT_LEAST_ONE
from sbkit.decoding.frames import BeamSettings, LogProbs
from sbkit.decoding.hotwords import HotwordScorer, decode_with_hotwords
from sbkit.decoding.hypothesis import Hypothesis
from sbkit.decoding.language_models import LanguageModels, load_language_models
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.decoding.scorer import Scorer, SumOfScorers
from sbkit.decoding.spelling import Spelling
from sbkit.decoding.token_scorer import TokenScorer
from sbkit.decoding.word_scorer import WordScorer, make_lexicon
from sbkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

LIKELY = -6.0  # log-probability of tokens that are tried
MOST_TOKENS = 12  # of a frame; a model that has learned little has many likely ones
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
        given: dict[Any, Any] = dict(values) if isinstance(values, Mapping) else {"": None}
        if not all(
            name in names and isinstance(value, int | float) and abs(value) < 1e3
            for name, value in given.items()
        ):
            raise SbkitError(
                f"The weights of a decoder must be numbers named {', '.join(names)}, but are "
                f"{str(values)[:100]}. Correct them, or write null to have them chosen."
            )
        return cls(**{name: float(value) for name, value in given.items()})

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
        beam_size: int = 32,
        weights: Mapping[str, float] | Weights | None = None,
    ) -> None:
        self.tokenizer, self.beam_size = tokenizer, beam_size
        self._source = language_models
        self.is_open = weights is None  # its weights are to be chosen
        given = Weights() if weights is None else weights
        self.weights = given if isinstance(given, Weights) else Weights.of(given)
        self._hotwords: HotwordScorer | None = None
        self._biased: PrefixBeamSearch | None = None

    @cached_property
    def language_models(self) -> LanguageModels:
        """Load the language models when they are needed first."""
        if isinstance(self._source, LanguageModels):
            return self._source
        return load_language_models(Path(self._source), self.tokenizer)

    def with_weights(self, weights: Weights, *, beam_size: int | None = None) -> "BeamDecoder":
        """Return the same decoder with other weights, and perhaps another beam."""
        return BeamDecoder(
            tokenizer=self.tokenizer,
            language_models=self.language_models,
            beam_size=beam_size or self.beam_size,
            weights=weights,
        )

    def with_hotwords(
        self, phrases: Sequence[str], reward: float = HOTWORD_REWARD
    ) -> "BeamDecoder":
        """Return the same decoder, which expects some phrases that can be spelled.

        Its transcript is another one only where one of them is then heard.
        """
        decoder = self.with_weights(self.weights)
        decoder._hotwords = HotwordScorer(phrases=phrases, spelling=self._spelling, reward=reward)
        added = dict.fromkeys(word for phrase in phrases for word in phrase.split())
        decoder._biased = decoder._search([*self._scorers(tuple(added)), decoder._hotwords])
        return decoder

    @cached_property
    def _spelling(self) -> Spelling:
        special = self.tokenizer.vocabulary
        return Spelling(
            pieces=self.tokenizer.pieces(),
            spell=self.tokenizer.encode,
            special=(special.blank, special.unk, special.bos, special.eos),
        )

    @cached_property
    def search(self) -> PrefixBeamSearch:
        """Make the search without hotwords."""
        return self._search(self._scorers())

    def _search(self, scorers: Sequence[Scorer]) -> PrefixBeamSearch:
        special = self.tokenizer.vocabulary
        settings = BeamSettings(
            vocab_size=special.size,
            blank=special.blank,
            beam_size=self.beam_size,
            token_threshold=LIKELY,
            most_tokens=MOST_TOKENS,
            excluded=(special.unk, special.bos, special.eos),
        )
        return PrefixBeamSearch(settings=settings, scorer=SumOfScorers(scorers=scorers))

    def _scorers(self, added: Sequence[str] = ()) -> list[Scorer]:
        """Return the language models with their weights; ``added`` words are known, too."""
        models, weights, scorers = self.language_models, self.weights, list[Scorer]()
        if models.words is not None and weights.word:
            scorers.append(
                WordScorer(
                    lm=models.words,
                    lexicon=make_lexicon(models.words, self._spelling),
                    spelling=self._spelling,
                    lm_weight=weights.word,
                    word_bonus=weights.word_bonus,
                    unknown_word_score=weights.unknown,
                    added_words=[word for word in added if word not in models.words],
                )
            )
        if models.tokens is not None and weights.token:
            scorers.append(
                TokenScorer(
                    lm=models.tokens,
                    pieces=self.tokenizer.pieces(),
                    lm_weight=weights.token,
                    token_bonus=weights.token_bonus,
                    special=tuple(self._spelling.special),
                )
            )
        return scorers

    def nbest(self, log_probs: LogProbs) -> list[Hypothesis]:
        """Return the beam of an utterance, (U, V), the best hypothesis first."""
        if self._hotwords is None or self._biased is None:
            return self.search.decode(log_probs)
        return decode_with_hotwords(
            log_probs, unbiased=self.search, biased=self._biased, hotwords=self._hotwords
        )

    def decode(self, log_probs: "Tensor", frame_lengths: "Tensor") -> list[list[int]]:
        """Return the tokens of each utterance: (B, U, V), (B,) -> ids."""
        rows = zip(log_probs.float().cpu().numpy(), frame_lengths.tolist(), strict=True)
        return [list(self.nbest(row[:frames])[0].tokens) for row, frames in rows]

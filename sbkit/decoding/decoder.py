"""What decoders have in common: their protocols, and those that use language models.

A decoder is greedy (`greedy.py`), a prefix beam search (`beam.py`), or the best path through a
decoding graph (`decoding_graph.py`).

Legend: U frames, V vocabulary, N sequences, L tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from sbkit.base.arrays import Counts, Float64s, LogProbs
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import Range, require_in_range
from sbkit.decoding.greedy import Hypothesis
from sbkit.lm.language_models import LanguageModels, load_language_models
from sbkit.text.tokenizer import Tokenizer

LANGUAGE_MODELS_FILE = "lm.safetensors"  # in a run and in a bundle
BEAM_SIZE = 32
MAX_BEAM_SIZE = 4096  # each hypothesis takes memory, and a downloaded bundle may ask for more
MAX_WEIGHT = 1e3
WORD_WEIGHTS = ("word", "unknown_word", "word_bonus")


Tokens = tuple[int, ...]


class AttentionScorer:
    """Score token sequences of one utterance with an attention decoder, each sequence once.

    log_probs: computes ln p of every token after each prefix of the sequences,
        (N, L) -> (N, L + 1, V).
    eos: the token that ends a sequence.

    >>> def uniform(tokens):
    ...     return np.log(np.full((len(tokens), tokens.shape[1] + 1, 4), 0.25))
    >>> decoder = AttentionScorer(log_probs=uniform, eos=3)
    >>> round(decoder.score([(1, 2)])[0], 2)  # 3 ln 0.25: two tokens and the end
    -4.16
    """

    def __init__(self, *, log_probs: Callable[[Counts], Float64s], eos: int) -> None:
        self._log_probs = log_probs
        self._eos = eos
        self._scores: dict[Tokens, float] = {}

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens, eos | audio) of each sequence."""
        unscored = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if unscored:
            lengths = np.array([len(tokens) for tokens in unscored])
            padded = np.full((len(unscored), lengths.max() + 1), self._eos)  # (N, L + 1)
            for row, tokens in zip(padded, unscored, strict=True):
                row[: len(tokens)] = tokens
            log_probs = self._log_probs(padded[:, :-1])  # (N, L + 1, V)
            token_scores = np.take_along_axis(log_probs, padded[:, :, None], axis=2).squeeze(2)
            is_counted = np.arange(padded.shape[1]) <= lengths[:, None]  # tokens and the first eos
            scores = np.where(is_counted, token_scores, 0.0).sum(1).tolist()
            self._scores |= zip(unscored, scores, strict=True)
        return [self._scores[tokens] for tokens in sequences]


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionScorer, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored: list[Hypothesis] = []
    for hypothesis, score in zip(hypotheses, scores, strict=True):
        added = weight * score
        total = hypothesis.score + added
        rescored.append(replace(hypothesis, score=total, attention_score=added))
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)


class Decoder(Protocol):
    """Finds the token sequences of a clip."""

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> Sequence[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first; there is at least one.

        attention: the attention decoder of the utterance, for a decoder that rescores.
        """


@runtime_checkable
class StreamDecoder(Decoder, Protocol):
    """A decoder that also takes a clip block by block; its state belongs to one stream."""

    def start(self) -> Any:
        """Begin a stream, and return its state."""

    def advance(self, state: Any, log_probs: LogProbs) -> Any:
        """Return the state after more frames, (U, V). The earlier state is no longer valid."""

    def finish(self, state: Any, attention: AttentionScorer | None = None) -> Sequence[Hypothesis]:
        """Return the hypotheses of a clip that ends here, as `nbest` does."""


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of the language models and of the attention decoder, relative to CTC.

    Attributes:
        word, token: factors of the log-probabilities of words and of tokens.
        word_bonus, token_bonus: added for each word and each token.
        unknown_word: added for each word that the model of words does not know.
        attention: factor of the attention decoder's log-probabilities when it rescores.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown_word: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5
    attention: float = 1.0

    @classmethod
    def from_plain(cls, values: Mapping[str, float]) -> Self:
        """Read weights by name; raise ConfigError for other names, and for unusable values."""
        names = [field.name for field in fields(cls)]
        is_valid = isinstance(values, Mapping) and all(
            name in names and isinstance(value, int | float) and abs(value) < MAX_WEIGHT
            for name, value in values.items()
        )
        if not is_valid:
            raise ConfigError(
                f"The weights of a decoder are {', '.join(names)}, each a number between "
                f"-{MAX_WEIGHT:g} and {MAX_WEIGHT:g}; got {str(values)[:100]}. Correct them, or "
                "write null to have them fitted."
            )
        return cls(**values)

    def plain(self) -> dict[str, float]:
        return asdict(self)


class LanguageModelDecoder(ABC):
    """A decoder with language models, which a run declares and a bundle stores.

    Attributes:
        decoder_type: its name in a YAML, in commands and in files.
        weight_ranges: where a fit looks for the weights that this decoder may use.
        needs_tuning: whether the weights are to be fitted to the validation sets.
        phrases: hotwords, which only beam search has; a bundle does not store them.

    Args:
        language_models: the models, or their file, which is loaded when it is first needed.
        beam_size: the number of hypotheses of a beam search.
        weights: None to have them fitted to the validation sets at the end of training.
        attention_rescoring: whether the attention decoder's score is added to the hypotheses.

    Raises:
        ConfigError: an argument is invalid.
    """

    RANGES: ClassVar = {
        "beam_size": Range(low=1, high=MAX_BEAM_SIZE, integer=True, advice=f"{BEAM_SIZE} is usual.")
    }
    decoder_type: ClassVar[str]
    weight_ranges: ClassVar[Mapping[str, tuple[float, float]]]
    phrases: tuple[str, ...] = ()
    _cached_names: ClassVar[frozenset[str]]  # attributes that are built when they are needed

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        language_models: str | Path | LanguageModels,
        beam_size: int = BEAM_SIZE,
        weights: Mapping[str, float] | DecoderWeights | None = None,
        attention_rescoring: bool = False,
    ) -> None:
        if not isinstance(attention_rescoring, bool):
            raise ConfigError(
                f"`attention_rescoring` must be True or False; got {attention_rescoring}."
            )
        require_in_range({"beam_size": beam_size}, self.RANGES)
        self.tokenizer = tokenizer
        self._language_models_source = language_models
        self.beam_size = beam_size
        self.needs_tuning = weights is None
        if weights is None:
            self.weights = DecoderWeights()
        elif isinstance(weights, DecoderWeights):
            self.weights = weights
        else:
            self.weights = DecoderWeights.from_plain(weights)
        self.attention_rescoring = attention_rescoring

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is built: the trees of a search are too deep for pickle."""
        return {name: value for name, value in vars(self).items() if name not in self._cached_names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(beam_size={self.beam_size}, {self.weights})"

    def plain(self) -> dict[str, Any]:
        """Return the decoder as a bundle stores it."""
        return {
            "decoder_type": self.decoder_type,
            "beam_size": self.beam_size,
            "attention_rescoring": self.attention_rescoring,
            "weights": self.weights.plain(),
        }

    @cached_property
    def language_models(self) -> LanguageModels:
        if isinstance(self._language_models_source, LanguageModels):
            return self._language_models_source
        return load_language_models(Path(self._language_models_source), self.tokenizer)

    @property
    def hotwords(self) -> frozenset[str]:
        """The words of all phrases."""
        return frozenset(word for phrase in self.phrases for word in phrase.split())

    @property
    def used_weights(self) -> list[str]:
        """The names of the weights that have an effect."""
        models = self.language_models
        used = [*WORD_WEIGHTS] if models.words is not None and self.weights.word else []
        used += ["token", "token_bonus"] if models.tokens is not None else []
        used += ["attention"] if self.attention_rescoring else []
        return [name for name in used if name in self.weight_ranges]

    # -- copies with changes

    def copy_with(self, **changes: Any) -> Self:
        """Return a decoder with other arguments; what it builds is built anew."""
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "language_models": self._language_models_source,
            "beam_size": self.beam_size,
            "weights": None if self.needs_tuning else self.weights,
            "attention_rescoring": self.attention_rescoring,
        }
        decoder = type(self)(**(arguments | changes))
        decoder.phrases = self.phrases
        return decoder

    def with_weights(self, weights: DecoderWeights) -> Self:
        """Return a copy with other weights, which shares the loaded language models."""
        return self.copy_with(weights=weights, language_models=self.language_models)

    @abstractmethod
    def with_hotwords(self, phrases: Iterable[str]) -> Self:
        """Return a copy with other hotwords; raise ConfigError for a decoder that takes none."""

    @abstractmethod
    def make_quick(self) -> Self:
        """Return a faster decoder whose best weights are nearly the same, to try weights with."""

    # -- decoding

    @abstractmethod
    def check(self) -> None:
        """Raise an error if this decoder cannot run here."""

    @abstractmethod
    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> list[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first; there is at least one.

        attention: the attention decoder of the utterance, which rescoring needs.
        """

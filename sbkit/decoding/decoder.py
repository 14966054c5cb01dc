"""What decoders have in common: their protocol, their weights, and rescoring.

Legend: U frames, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.greedy import Hypothesis

LANGUAGE_MODELS_FILE = "lm.safetensors"  # in a run and in a bundle
MAX_DECODER_WEIGHT = 1e3
WORD_WEIGHTS = ("word", "unknown_word", "word_bonus")


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionScorer, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored = [
        replace(hypothesis, score=hypothesis.score + weight * score)
        for hypothesis, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)


class Decoder(Protocol):
    """Finds the token sequences of a clip, or of a stream block by block."""

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> Sequence[Hypothesis]:
        """Return the hypotheses of a whole clip, (U, V), the best first; there is at least one."""

    def start(self) -> Any:
        """Begin a stream, and return its state, which belongs to this stream."""

    def advance(self, state: Any, log_probs: LogProbs) -> Any:
        """Return the state after more frames, (U, V). The earlier state is no longer valid."""

    def finish(self, state: Any, attention: AttentionScorer | None = None) -> Sequence[Hypothesis]:
        """Return the hypotheses of a clip that ends here, as `nbest` does."""


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The weights of the language models and of the attention decoder, relative to CTC.

    word, token, attention: factors of log-probabilities.
    word_bonus, token_bonus: added for each word and each token.
    unknown_word: added for each word that the model of words does not know.
    """

    word: float = 0.6
    word_bonus: float = 1.0
    unknown_word: float = -5.0
    token: float = 0.3
    token_bonus: float = 0.5
    attention: float = 1.0

    @classmethod
    def from_plain(cls, values: Mapping[str, float]) -> Self:
        """Read weights by name."""
        names = [field.name for field in fields(cls)]
        is_valid = isinstance(values, Mapping) and all(
            name in names and isinstance(value, int | float) and abs(value) < MAX_DECODER_WEIGHT
            for name, value in values.items()
        )
        if not is_valid:
            raise ConfigError(
                f"The weights of a decoder are {', '.join(names)}, each a number between "
                f"-{MAX_DECODER_WEIGHT:g} and {MAX_DECODER_WEIGHT:g}, but are {str(values)[:100]}."
            )
        return cls(**values)

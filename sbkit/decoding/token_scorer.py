"""An n-gram model over the tokens of the recognizer."""

from collections.abc import Hashable, Sequence

from sbkit.base.errors import SbkitError
from sbkit.decoding.scorer import END, UNKNOWN, LanguageModel

KNOWN_SHARE = 0.5  # of the pieces; a model of words knows few of them


class TokenScorer:
    """Add lm_weight * ln P(tokens `</s>`) + token_bonus * (number of tokens).

    lm: its words are pieces of the tokenizer, `▁` included; pieces: by token id.
    Raises SbkitError where the model knows less than half of the pieces: it is another's.
    """

    def __init__(
        self,
        *,
        lm: LanguageModel,
        pieces: Sequence[str],
        lm_weight: float = 0.5,
        token_bonus: float = 0.0,
        special: Sequence[int] = (0, 1, 2, 3),
    ) -> None:
        self._lm, self._lm_weight, self._token_bonus = lm, lm_weight, token_bonus
        self._ids = [lm.id_of(piece) for piece in pieces]
        spoken = [self._ids[token] for token in range(len(pieces)) if token not in special]
        known = sum(each != UNKNOWN for each in spoken)
        if known < KNOWN_SHARE * len(spoken):
            raise SbkitError(
                "The language model must be of the tokenizer's pieces, but knows "
                f"{known} of {len(spoken)}. Train it on text that this tokenizer encoded."
            )

    def start(self) -> Hashable:
        """Return the state after `<s>`."""
        return self._lm.start

    def step(self, state: tuple[int, ...], token: int) -> tuple[float, Hashable]:
        """Return the weighted log-probability of a token, and the state after it."""
        log_prob, after = self._lm.score(state, self._ids[token])
        return self._lm_weight * log_prob + self._token_bonus, after

    def end(self, state: tuple[int, ...]) -> float:
        """Return the weighted log-probability of `</s>`."""
        return self._lm_weight * self._lm.score(state, END)[0]

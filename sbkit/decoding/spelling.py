"""How the tokens of a model spell text: the same for characters, BPE and unigram pieces.

A token sequence is read as the characters of its pieces, where `▁` separates words; begin and end
of the audio do too. So a word is known however it is cut into pieces.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbkit.text.tokenizer import Tokenizer

SPACE = "▁"  # as sentencepiece writes it


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The pieces of a tokenizer by id, and its own way to encode text.

    spell: `Tokenizer.encode`; special: ids that leave no trace in a text, `<unk>` among them.
    """

    pieces: Sequence[str]
    spell: Callable[[str], Sequence[int]]
    special: Collection[int] = (0, 1, 2, 3)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Spelling":
        """Return how a tokenizer spells."""
        special = tokenizer.vocabulary.special
        return cls(pieces=tokenizer.pieces(), spell=tokenizer.encode, special=special)

    def letters(self, text: str) -> str:
        """Return the characters that the model emits for a text, "" where it cannot spell it.

        Words are separated by one `▁`; none begins or ends the text.
        """
        ids = self.spell(text)
        if any(token in self.special for token in ids):
            return ""
        return SPACE.join(self.words(ids))

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Return the words that a token sequence spells."""
        return "".join(map(self._text, tokens)).replace(SPACE, " ").split()

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Return what each token adds to a text, nothing for a special one."""
        return tuple(map(self._text, range(len(self.pieces))))

    def _text(self, token: int) -> str:
        return "" if token in self.special else self.pieces[token]

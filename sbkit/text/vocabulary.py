"""The one space of label ids that tokenizer, heads, losses and decoding agree on."""

from collections.abc import Iterable
from dataclasses import dataclass

from sbkit.base.errors import SbkitError


@dataclass(frozen=True)
class Vocabulary:
    """Ids from 0 to ``size`` - 1, four of them special, each with an id of its own.

    The blank also pads a batch of labels, because it can never be a label itself.
    """

    size: int
    blank: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3

    def __post_init__(self) -> None:
        """Refuse special ids that collide or lie outside the space."""
        special = {"blank": self.blank, "unk": self.unk, "bos": self.bos, "eos": self.eos}
        if len(set(special.values()) & set(range(self.size))) < len(special):
            raise SbkitError(
                "blank, unk, bos and eos of the `tokenizer` must be four different ids from 0 to "
                f"{self.size - 1}, but are {special}. Train the tokenizer again."
            )

    @property
    def special(self) -> tuple[int, ...]:
        """Return the four special ids."""
        return self.blank, self.unk, self.bos, self.eos

    def check_targets(self, ids: Iterable[int], *, of: str) -> None:
        """Refuse an id that a loss would read out of bounds or take for the blank.

        On the CPU `torch.nn.functional.ctc_loss` gives a finite, wrong value for such an id and on
        a GPU the whole process dies on an assertion, so this runs before any kernel sees it.
        """
        for label in ids:
            if self.refuses(label):
                raise SbkitError(
                    f"Every label must be an id from 0 to {self.size - 1} and not the blank "
                    f"({self.blank}), but {of} holds {label}. Use the `tokenizer` of this run."
                )

    def refuses(self, label: int) -> bool:
        """Return whether no loss may see an id: it is out of bounds, or the blank."""
        return not 0 <= label < self.size or label == self.blank

    def check_head(self, *, name: str, outputs: int) -> None:
        """Refuse a head whose number of outputs is not the number of labels."""
        self._check_size(f"`{name}` must have as many outputs", outputs)

    def check_embedding(self, *, name: str, rows: int) -> None:
        """Refuse an embedding whose number of rows is not the number of labels."""
        self._check_size(f"The embedding of `{name}` must have as many rows", rows)

    def _check_size(self, claim: str, size: int) -> None:
        if size != self.size:
            raise SbkitError(
                f"{claim} as the tokenizer has tokens ({self.size}), but has {size}. "
                "Write `!ref <tokenizer.vocab_size>` for its size."
            )

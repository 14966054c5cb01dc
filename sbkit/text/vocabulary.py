"""The one space of label ids that tokenizer, heads, losses and decoding agree on.

The classes of a classification task: names to ids and back, a line each in a text file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, write_text_atomically
from sbkit.base.messages import listed


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


LABEL_FILE = "labels.txt"  # of a classifier's run
LARGEST = 1 << 22  # bytes


class ClassLabels:
    """The names of the classes, in the order of their ids.

    ``content``: the bytes of the file where they were read before.
    Raises SbkitError where the file cannot be read, or holds fewer than two names or one twice.
    """

    def __init__(self, *, file: str | Path, content: bytes | None = None) -> None:
        self.file = Path(file)
        try:
            if content is None:
                content = read_regular(self.file, max_bytes=LARGEST, subject="The list of classes")
            self.names = content.decode().split("\n")[:-1]
        except UnicodeDecodeError as error:
            raise SbkitError(
                f"{self.file} must be UTF-8, but is not ({error}). Restore it."
            ) from error
        if len(set(self.names)) < max(2, len(self.names)) or not all(self.names):
            raise SbkitError(
                f"{self.file} must list two classes or more, each once, but holds "
                f"{len(self.names)} lines of which {len(set(self.names))} differ. Restore it."
            )
        self._ids = {name: id for id, name in enumerate(self.names)}

    @property
    def size(self) -> int:
        """Count the classes."""
        return len(self.names)

    def encode(self, name: str) -> int:
        """Return the id of a class, which must be one of them."""
        return self._ids[name]


def ensure_labels(file: Path, names: Iterable[str]) -> ClassLabels:
    """Write the classes in alphabetical order, unless the run folder has them; refuse others.

    Raises SbkitError where the run folder lists other classes, or there are fewer than two.
    """
    wanted = sorted(set(names))
    if len(wanted) < 2:
        raise SbkitError(
            "The training set must have two classes or more, but every label in it is "
            f"{wanted[0] if wanted else 'missing'}. Choose another `label`, or add data."
        )
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, "".join(f"{name}\n" for name in wanted))
    labels = ClassLabels(file=file)
    if labels.names != wanted:
        others = listed(sorted({*wanted}.symmetric_difference(labels.names)))
        raise SbkitError(
            f"The classes of the training set must be those that {file} lists, but differ in "
            f"{others}. Choose another output_folder."
        )
    return labels

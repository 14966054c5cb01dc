"""The ids that tokenizer, heads, losses and decoders share: tokens of text, or classes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sbkit.base.errors import BundleError, ConfigError, DataError, SbkitError
from sbkit.base.files import parsing_errors, read_regular, write_text_atomically
from sbkit.base.messages import listed


@dataclass(frozen=True)
class Vocabulary:
    """Token ids from 0 to ``size`` - 1, four of them special.

    The blank also pads batches of tokens, because no text contains it.

    >>> Vocabulary(size=40).special
    (0, 1, 2, 3)
    """

    size: int
    blank: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3

    def __post_init__(self) -> None:
        special = {"blank": self.blank, "unk": self.unk, "bos": self.bos, "eos": self.eos}
        if len(set(special.values()) & set(range(self.size))) < len(special):
            raise SbkitError(
                f"The `tokenizer` must have four different ids from 0 to {self.size - 1}, but has "
                f"{special}.",
                keys=("tokenizer",),
            )

    @property
    def special(self) -> tuple[int, ...]:
        return self.blank, self.unk, self.bos, self.eos

    def check_targets(self, ids: Iterable[int], *, clip: str) -> None:
        """Raise DataError for an id that is out of bounds or the blank.

        For such an id `torch.nn.functional.ctc_loss` returns a finite, wrong value on the CPU, and
        on a GPU an assertion ends the process. So this check runs before any kernel.
        """
        for token in ids:
            if not 0 <= token < self.size or token == self.blank:
                raise DataError(
                    f"Every label must be an id from 0 to {self.size - 1} and not the blank "
                    f"({self.blank}), but {clip} holds {token}. Use the `tokenizer` of this run.",
                    keys=("tokenizer",),
                )

    def check_size(self, size: int, *, key: str, unit: str) -> None:
        """Raise ConfigError unless the part at a key has an output or a row for each token."""
        if size != self.size:
            raise ConfigError(
                f"`{key}` must have as many {unit} as the tokenizer has tokens ({self.size}), but "
                f"has {size}. Write `!ref <tokenizer.vocab_size>` for its size.",
                keys=(key,),
            )


MAX_LABEL_FILE_BYTES = 1 << 22


class ClassLabels:
    """The names of classes or symbols by their ids; `content` is the file, if it was read."""

    def __init__(self, *, file: str | Path, content: bytes | None = None) -> None:
        self.file = Path(file)
        if content is None:
            content = read_regular(
                self.file, max_bytes=MAX_LABEL_FILE_BYTES, subject="The list of classes"
            )
        with parsing_errors(self.file, "be UTF-8", fix="Restore it."):
            self.names = content.decode().split("\n")[:-1]
        if len(set(self.names)) < max(2, len(self.names)) or not all(self.names):
            num_different = len(set(self.names))
            raise BundleError(
                f"{self.file} must list two or more different classes, but has {len(self.names)} "
                f"lines, {num_different} of them different."
            )
        self._ids = {name: id for id, name in enumerate(self.names)}

    @property
    def size(self) -> int:
        return len(self.names)

    def encode(self, name: str) -> int:
        return self._ids[name]


def ensure_labels(file: Path, names: Iterable[str]) -> ClassLabels:
    """Write the classes in alphabetical order, unless the run folder lists them already."""
    classes = sorted(set(names))
    if len(classes) < 2:
        raise DataError(
            "The training set must have two classes or more, but every label in it is "
            f"{classes[0] if classes else 'missing'}."
        )
    if "" in classes:
        raise DataError("Some rows of the training set have no label.")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, "".join(f"{name}\n" for name in classes))
    labels = ClassLabels(file=file)
    if labels.names != classes:
        differences = listed(sorted({*classes}.symmetric_difference(labels.names)))
        raise DataError(
            f"The classes of the training set and of {file} differ in {differences}. "
            "Choose another output_folder."
        )
    return labels

"""The classes of a classification task: names to ids and back, a line each in a text file."""

from collections.abc import Iterable
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, write_text_atomically
from sbkit.base.text import listed

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
                content = read_regular(self.file, largest=LARGEST, what="The list of classes")
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

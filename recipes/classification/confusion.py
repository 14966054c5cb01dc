"""Which classes are taken for which: counts, a table and a picture."""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbkit.base.files import write_bytes_atomically, write_text_atomically


@dataclass(frozen=True)
class Result:
    """One utterance: its class, and the one that was found."""

    id: str
    right: str
    found: str

    @property
    def is_right(self) -> bool:
        """Compare the two."""
        return self.right == self.found


@dataclass(frozen=True)
class Confusion:
    """Counts of utterances: a row for each class, a column for each answer."""

    names: Sequence[str]
    counts: npt.NDArray[np.int64]


def count(results: Sequence[Result], names: Sequence[str]) -> Confusion:
    """Count the answers to each class."""
    pairs = Counter((each.right, each.found) for each in results)
    return Confusion(names, np.array([[pairs[right, found] for found in names] for right in names]))


def write_table(file: Path, matrix: Confusion) -> None:
    """Write a TSV: the right class in the first column, the answers across."""
    rows = [["right / found", *matrix.names]]
    rows += [
        [name, *map(str, counts)]
        for name, counts in zip(matrix.names, matrix.counts.tolist(), strict=True)
    ]
    write_text_atomically(file, "".join("\t".join(row) + "\n" for row in rows))


def draw(png: Path, matrix: Confusion) -> None:
    """Draw the share of each answer, with its count where there are few classes."""
    from matplotlib.figure import Figure  # 0.7 s to import

    size = max(4.0, 0.5 * len(matrix.names))  # inches
    figure = Figure(figsize=(size + 1, size), dpi=120, layout="constrained")
    axes = figure.subplots()
    shares = matrix.counts / np.maximum(1, matrix.counts.sum(1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(matrix.names))
    axes.set_xticks(ticks, matrix.names, rotation=90)
    axes.set_yticks(ticks, matrix.names)
    axes.set(xlabel="found", ylabel="right")
    if len(matrix.names) <= 20:
        for (row, column), number in np.ndenumerate(matrix.counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(number), ha="center", va="center", color=color)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes_atomically(png, picture.getvalue())

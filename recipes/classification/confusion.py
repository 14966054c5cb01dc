"""Which classes are taken for which: counts, a table and a picture."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbkit.base.files import write_bytes_atomically, write_text_atomically
from sbkit.tasks.utterance_classification import Classified

MOST_DRAWN = 50  # classes; the picture of 1,200 took more than five minutes
Counts = npt.NDArray[np.int64]  # a row for each class, a column for each answer


def count(results: Sequence[Classified], names: Sequence[str]) -> Counts:
    """Count the answers to each class."""
    pairs = Counter((result.target, result.predicted) for result in results)
    return np.array([[pairs[right, found] for found in names] for right in names])


def write_table(file: Path, counts: Counts, names: Sequence[str]) -> None:
    """Write a TSV: the right class in the first column, the answers across."""
    rows = ([name, *map(str, row.tolist())] for name, row in zip(names, counts, strict=True))
    lines = ["\t".join(row) + "\n" for row in (["right / found", *names], *rows)]
    write_text_atomically(file, "".join(lines))


def draw(png: Path, counts: Counts, names: Sequence[str]) -> None:
    """Draw the share of each answer, with its count; of many classes those with most errors."""
    from matplotlib.figure import Figure  # 0.7 s to import

    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    drawn = np.sort(np.argsort(-errors, kind="stable")[:MOST_DRAWN])
    counts, shares = (each[np.ix_(drawn, drawn)] for each in (counts, shares))
    names = [names[each] for each in drawn]
    inches = max(4.0, 0.5 * len(names))
    figure = Figure(figsize=(inches + 1, inches), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    for (row, column), number in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(number), ha="center", va="center", color=color)
    figure.savefig(picture := io.BytesIO(), format="png", dpi=120)
    write_bytes_atomically(png, picture.getvalue())

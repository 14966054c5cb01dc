"""How many of the best checkpoints are averaged: as many as make validation best.

The mean of the last weights of a converged run beats each of them; the mean over a run that was
still learning is worse than its best checkpoint. So the mean of all, of half of them, and so on
down to the best alone, are scored on the validation set, and the best of these is taken.
Source: model soups, Wortsman et al. 2022, over prefixes instead of one by one: a validation set is
small, and each further try would fit it more.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.files import to_json, write_text_atomically

FILE = "averaged.json"  # in the folder of the checkpoints


@dataclass(frozen=True)
class Averaged:
    """Which checkpoints a run is tested and exported with.

    checkpoints: names of their folders, the best first; of: all that were there to choose from;
    scores: on the validation set by how many were averaged.
    """

    checkpoints: tuple[str, ...]
    of: tuple[str, ...]
    scores: dict[str, float]

    def __str__(self) -> str:
        count = len(self.checkpoints)
        what = "the best checkpoint" if count == 1 else f"the mean of the {count} best checkpoints"
        if not self.scores:
            return f"tested: {what}"
        tried = ", ".join(f"{score:.4f} with {count}" for count, score in self.scores.items())
        return f"tested: {what} of {len(self.of)} (on validation, lower is better: {tried})"


def choose(ranked: Sequence[Checkpoint], score: Callable[[int], float]) -> Averaged:
    """Score the means of the first checkpoints and take the best; of equal ones the most averaged.

    score(count): the error of the mean of the ``count`` first on the validation set, such as CER:
    lower is better, NaN the worst. It is called at most log2(len(ranked)) + 1 times.
    """
    halves = [len(ranked) >> times for times in range(len(ranked).bit_length())]
    scores = {count: score(count) for count in halves} if len(ranked) > 1 else {}
    scored = [count for count in scores if not math.isnan(scores[count])]
    best = min(scored, key=lambda count: (scores[count], -count), default=1)
    names = tuple(each.path.name for each in ranked)
    return Averaged(names[:best], names, {str(count): value for count, value in scores.items()})


def write_averaged(folder: Path, averaged: Averaged) -> None:
    """Write the choice beside the checkpoints, for export and for a test that is repeated."""
    write_text_atomically(folder / FILE, to_json(asdict(averaged), indent=1) + "\n")


def read_averaged(folder: Path) -> Averaged | None:
    """Read the choice, None where none was made."""
    file = folder / FILE
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    return Averaged(tuple(record["checkpoints"]), tuple(record["of"]), record["scores"])

"""The checkpoints of a folder: found, ranked, checked for damage; nothing in it is changed."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sbkit.base.checksums import CHECKSUMS, find_damage
from sbkit.base.errors import BundleError
from sbkit.base.files import from_plain, parsing_errors, read_file, to_json, write_text_atomically
from sbkit.checkpoint.folder import META_FILE, Checkpoint, checkpoint_folders, read_checkpoint

logger = logging.getLogger(__name__)

# Keys of a checkpoint's meta file: the metric that ranks it, the text table, the task, its parts
RANKED_BY, NORMALIZER, PARTS = "ranked_by", "normalizer", "parts"
AVERAGED_FILE = "averaged.json"  # in the folder of the checkpoints

Importance = Callable[[Checkpoint], float]
Predicate = Callable[[Checkpoint], bool]


@dataclass(frozen=True)
class AveragedCheckpoints:
    """The checkpoints that a run is tested and exported with.

    The mean of the last weights of a converged run beats each of them, but the mean over a run that
    was still learning is worse than its best checkpoint. So the mean of all candidates, of the
    better half, of the best quarter and so on down to the single best one are validated, and the
    best mean is used (model soups, Wortsman et al. 2022, with fewer trials, since a validation set
    is small).

    Attributes:
        checkpoints: names of their folders, the best first.
        candidates: names of all folders that they were chosen from, the best first.
        errors: on the validation set, by the number of checkpoints averaged.
    """

    checkpoints: tuple[str, ...]
    candidates: tuple[str, ...]
    errors: dict[str, float]

    def __str__(self) -> str:
        count = len(self.checkpoints)
        tested = "the best checkpoint"
        if count > 1:
            tested = f"the mean of the {count} best checkpoints"
        if not self.errors:
            return f"tested: {tested}"
        errors = ", ".join(f"{error:.4f} with {count}" for count, error in self.errors.items())
        return (
            f"tested: {tested} of {len(self.candidates)} (on validation, lower is better: {errors})"
        )

    def write(self, folder: Path | str) -> None:
        """Write the choice beside the checkpoints, for export and for a repeated test."""
        content = {"checkpoints": self.checkpoints, "of": self.candidates, "scores": self.errors}
        write_text_atomically(Path(folder, AVERAGED_FILE), to_json(content, indent=1) + "\n")

    @staticmethod
    def read(folder: Path | str) -> "AveragedCheckpoints | None":
        """Read the choice from the folder of a run's checkpoints; None if there is no choice."""
        file = Path(folder, AVERAGED_FILE)
        if not file.exists():
            return None
        with parsing_errors(file, "be what training wrote", fix="Remove it.", is_json=True):
            content = json.loads(read_file(file))
            content["candidates"] = content.pop("of")
            content["errors"] = content.pop("scores")
            return from_plain(AveragedCheckpoints, content)


class SavedCheckpoints:
    """The checkpoints in a folder, which a run may be training in.

    >>> SavedCheckpoints(Path("results/none/checkpoints")).find()
    []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._logged: set[str] = set()

    def all(self) -> list[Checkpoint]:
        """Return those whose meta file can be read."""
        return [*filter(None, map(read_checkpoint, checkpoint_folders(self.folder)))]

    def find(
        self,
        *,
        max_key: str | None = None,
        min_key: str | None = None,
        importance_key: Importance | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> list[Checkpoint]:
        """Rank by a value of the meta file, or by date; the best come first.

        The arguments are SpeechBrain's. Of equal values, the newer comes first. NaN, the metric of
        data without labels, comes last. A checkpoint without the value is left out.
        """
        checkpoints = sorted(filter(ckpt_predicate, self.all()), key=date_of)[::-1]
        if not (key := max_key or min_key or ""):
            return sorted(checkpoints, key=importance_key or date_of, reverse=True)

        def importance(checkpoint: Checkpoint) -> float:
            value = float(checkpoint.meta[key]) * (1 if max_key else -1)
            return -math.inf if math.isnan(value) else value

        checkpoints = [checkpoint for checkpoint in checkpoints if key in checkpoint.meta]
        return sorted(checkpoints, key=importance, reverse=True)

    def find_whole(self, count: int, **keys: Any) -> list[Checkpoint]:
        """Find the ``count`` best undamaged checkpoints, and log better ones that are damaged."""
        folders = checkpoint_folders(self.folder)
        for folder in folders:
            if read_checkpoint(folder) is None:
                self._log_once(f"{folder} is skipped: its {META_FILE} cannot be read.")
        undamaged = [*islice(filter(self._is_whole, self.find(**keys)), count)]
        if folders and not undamaged:
            raise BundleError(
                f"{self.folder} has only damaged checkpoints ({len(folders)}). Move the folder "
                "away to start over."
            )
        return undamaged

    def find_averaged(self, **keys: Any) -> list[Checkpoint]:
        """Find the checkpoints that the test averaged; without a current choice, only the best one.

        Without keys, checkpoints are ranked by the metric of the recipe that saved them.
        """
        keys = keys or self.ranked_by()
        averaged = AveragedCheckpoints.read(self.folder)
        if averaged is not None:
            ranked = self.find_whole(len(averaged.candidates), **keys)
            if tuple(checkpoint.path.name for checkpoint in ranked) == averaged.candidates:
                return ranked[: len(averaged.checkpoints)]
        return self.find_whole(1, **keys)

    def ranked_by(self) -> dict[str, str]:
        """Return the metric that the checkpoints are ranked by, as `max_key` or `min_key`."""
        ranked = (checkpoint.meta.get(RANKED_BY) for checkpoint in self.all())
        keys: dict[str, str | None] = next(filter(None, ranked), {})
        return {direction: name for direction, name in keys.items() if name}

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.path / CHECKSUMS).exists():
            self._log_once(f"{checkpoint.path} has no checksums: SpeechBrain saved it.")
            return True
        damage = find_damage(checkpoint.path)
        if damage is not None:
            self._log_once(f"{checkpoint.path} is skipped: {damage}. Trying the next best.")
        return damage is None

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)


def date_of(checkpoint: Checkpoint) -> float:
    """Return when a checkpoint was saved, in seconds since 1970."""
    return float(checkpoint.meta["unixtime"])

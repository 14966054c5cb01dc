"""Whether a run has anything left to train, and whose results lie in its folder."""

from pathlib import Path

from sbkit.checkpoint.declaration import CHECKPOINTS
from sbkit.checkpoint.listing import newest_described

SUMMARY = "summary.json"  # the last file that a test writes


def is_finished(run_folder: Path, *, number_of_epochs: int) -> bool:
    """Return whether the newest checkpoint of a run ends its last epoch.

    Ask before training: afterwards every run is finished.
    """
    newest = newest_described(run_folder / CHECKPOINTS)
    if newest is None or not newest.meta.get("end-of-epoch", True):
        return False
    epoch = newest.meta.get("epoch")
    return isinstance(epoch, int) and epoch >= number_of_epochs


def may_write_results(run_folder: Path, *, was_finished: bool) -> bool:
    """Return whether a test may write its results: never over those of a run that trained nothing.

    was_finished: what `is_finished` said before training.
    """
    return not (was_finished and (run_folder / SUMMARY).is_file())

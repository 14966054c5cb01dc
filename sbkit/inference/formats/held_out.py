"""The test sets of a run: the clips that training never heard."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.config.hparams import read_knobs
from sbkit.inference.bundle import RESOLVED
from sbkit.inference.whole_clips import WholeClips, read_whole_clips
from sbkit.logs.utterances import hash_pairs
from sbkit.train.cost import SUMMARY
from sbkit.train.recipe import load_recipe, refuse_foreign_modules

LARGEST_SUMMARY = 1 << 24  # bytes


@dataclass(frozen=True)
class HeldOut:
    """The test sets by name, as the run was tested on them."""

    sets: Mapping[str, datasets.Dataset]
    sample_rate: int

    def batches(self) -> Iterator[WholeClips]:
        """Yield all utterances of all sets."""
        for rows in self.sets.values():
            yield from read_whole_clips(rows, self.sample_rate)


def find_held_out(run: Path, *, own: frozenset[str]) -> HeldOut:
    """Prepare the test sets that a run's YAML names, as training does.

    Only recipes of sbkit, and modules that the user vouches for, are imported.
    Raises SbkitError where the data is not there, or is not what the run was tested on.
    """
    knobs = read_knobs(run / RESOLVED, {})
    refuse_foreign_modules(knobs, run / RESOLVED, own)
    sets = load_recipe(knobs, run / RESOLVED, beside=False).prepare_splits(knobs).test
    if not sets:
        raise SbkitError(f"A run must have test sets to be compared on, but {run} has none.")
    tested = read_summary(run).get("test", {})
    for name, rows in sets.items():
        expected = tested.get(name, {}).get("references")
        if expected is not None and expected != _references(rows):
            raise SbkitError(
                f"The test set `{printable(name)}` must be the one that the run was tested on, but "
                "its ids or transcripts changed since. Restore it."
            )
    return HeldOut(sets, int(knobs["sample_rate"]))


def read_summary(run: Path) -> dict[str, Any]:
    """Read what a run says of its results; an empty mapping where it says nothing."""
    if not (run / SUMMARY).is_file():
        return {}
    content = read_regular(run / SUMMARY, largest=LARGEST_SUMMARY, what="The run's summary")
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SbkitError(
            f"{run / SUMMARY} must be what training wrote, but cannot be read. Remove it."
        ) from error
    return said if isinstance(said, dict) else {}


def _references(rows: datasets.Dataset) -> str:
    return hash_pairs(zip(rows["id"][:], rows["text"][:], strict=True))

"""The test sets of a run, which formats are compared on and `sbkit score` scores."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.config.hparams import read_knobs
from sbkit.evaluate.summary import SUMMARY
from sbkit.evaluate.utterances import hash_pairs
from sbkit.inference.transcribe.whole_clips import WholeClips, read_whole_clips
from sbkit.train.recipe import load_recipe


@dataclass(frozen=True)
class HeldOut:
    """The test sets by name, as the run was tested on them."""

    sets: Mapping[str, datasets.Dataset]
    sample_rate: int

    def batches(self) -> Iterator[WholeClips]:
        """Yield all utterances of all sets."""
        for rows in self.sets.values():
            yield from read_whole_clips(rows, self.sample_rate)


def find_held_out(run: Path) -> HeldOut:
    """Prepare the test sets that a run's YAML names, as training does.

    Raises SbkitError where the data is not there, or is not what the run was tested on.
    """
    knobs = read_knobs(run / RESOLVED, {})
    sets = load_recipe(knobs, run / RESOLVED).prepare_splits(knobs).test
    if not sets:
        raise SbkitError(
            f"A run must have test sets to be scored or compared on, but {run} has none. Name data "
            f"of yours: sbkit score {run} test.csv"
        )
    summary = run / SUMMARY
    tested = (
        json.loads(summary.read_text(encoding="utf-8")).get("test", {}) if summary.is_file() else {}
    )
    for name, rows in sets.items():
        expected = tested.get(name, {}).get("references")
        pairs = zip(rows["id"][:], rows["text"][:], strict=True)
        if expected is not None and expected != hash_pairs(pairs):
            raise SbkitError(
                f"The test set `{name}` must be the one that the run was tested on, but its ids or "
                "transcripts changed since. Restore it."
            )
    return HeldOut(sets, int(knobs["sample_rate"]))

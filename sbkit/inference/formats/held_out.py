"""The test sets of a run: the clips that training never heard."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.config.hparams import read_knobs
from sbkit.evaluate.summary import SUMMARY
from sbkit.evaluate.utterances import hash_pairs
from sbkit.inference.transcribe.whole_clips import WholeClips, read_whole_clips
from sbkit.train.recipe import load_recipe

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
    tested = _read_references(run)
    for name, rows in sets.items():
        if tested.get(name) is not None and tested[name] != _references(rows):
            raise SbkitError(
                f"The test set `{name}` must be the one that the run was tested on, but its ids or "
                "transcripts changed since. Restore it."
            )
    return HeldOut(sets, int(knobs["sample_rate"]))


def _read_references(run: Path) -> dict[str, Any]:
    """Return the hash of the references of each test set, as far as the run's summary has it."""
    if not (run / SUMMARY).is_file():
        return {}
    content = read_regular(run / SUMMARY, largest=LARGEST_SUMMARY, what="The run's summary")
    try:
        tested = json.loads(content).get("test", {})
        return {name: figures.get("references") for name, figures in tested.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{run / SUMMARY} must be what training wrote, but cannot be read. Remove it."
        ) from error


def _references(rows: datasets.Dataset) -> str:
    return hash_pairs(zip(rows["id"][:], rows["text"][:], strict=True))

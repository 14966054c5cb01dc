"""Utterances that are in a split more than once: equal ids, and equal clips of equal text."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np

from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.check.utterances import TEXT, named, notice
from sbkit.data.splits import Excluded
from sbkit.data.store import take_columns

COMPARED = 2000  # clips of a split whose audio is compared; about 300 MB are read


def check_duplicates(planned: PlannedRun) -> Iterator[Finding]:
    """Find rows with the id of another row of their split, and clips that are copies."""
    equal_ids = [item for name in planned.splits.named() for item in _equal_ids(planned, name)]
    yield from notice(
        planned,
        found=equal_ids,
        declared="every row must have an id (the clip's name without its ending) of its own",
        effect="repeat the id of a row before",
        fix="Take the repeated rows out, or rename the clips.",
    )
    copies = [item for name in planned.splits.named() for item in _copies(planned, name)]
    yield from notice(
        planned,
        found=copies,
        declared="every clip must be recorded once",
        effect="are equal, sample for sample, to another clip of the same split",
        fix="Take the copies out: a clip that is there twice counts twice.",
    )


def _equal_ids(planned: PlannedRun, split: str) -> Iterator[Excluded]:
    ids = np.asarray(planned.splits.named()[split]["id"][:])
    first = np.unique(ids, return_index=True)[1]
    repeated = np.setdiff1d(np.arange(len(ids)), first)
    return named(planned, split, repeated, "repeated id")


def _copies(planned: PlannedRun, split: str) -> Iterator[Excluded]:
    """Compare the audio of clips that have the same length and text, and another id."""
    dataset = planned.splits.named()[split]
    names = [name for name in ("id", "samples", TEXT) if name in dataset.column_names]
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    seen: set[str] = set()
    for row, (utterance, *like) in enumerate(
        zip(*(take_columns(dataset, *names)[name].to_pylist() for name in names), strict=True)
    ):
        if utterance not in seen:
            rows[tuple(like)].append(row)
        seen.add(utterance)
    alike = (each for each in rows.values() if len(each) > 1)
    compared = (row for group in islice(alike, COMPARED // 2) for row in group)
    for row, original in _equal_audio(dataset, list(islice(compared, COMPARED))):
        yield from named(planned, split, np.array([row]), "copied clip", [f"of {original}"])


def _equal_audio(dataset: datasets.Dataset, rows: list[int]) -> Iterator[tuple[int, str]]:
    """Yield each row whose audio is that of a row before, and that row's id."""
    first: dict[int, str] = {}
    for row in rows:
        clip = dataset[row]
        original = first.setdefault(hash(clip["audio"]), clip["id"])
        if original != clip["id"]:
            yield row, original

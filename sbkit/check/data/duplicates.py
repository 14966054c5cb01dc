"""Clips that are twice in a split, by their audio."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np

from sbkit.check.data.utterances import TEXT, notice
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import take_columns
from sbkit.data.storage.audio_store import read_rows

COMPARED = 2000  # clips of a split whose audio is compared; about 300 MB are read


def check_duplicates(planned: PlannedRun) -> Iterator[Finding]:
    """Find copied clips."""
    splits = planned.splits.named()
    copies = {name: _copies(split) for name, split in splits.items()}
    yield from notice(
        planned,
        found={name: np.array(list(each), dtype=np.int64) for name, each in copies.items()},
        reason="copied clip",
        detail=lambda split, row: f"of {copies[split][row]}",
        declared="every clip must be recorded once",
        effect="are equal, sample for sample, to another clip of the same split",
        fix="Take the copies out: a clip that is there twice counts twice.",
    )


def _copies(dataset: datasets.Dataset) -> dict[int, str]:
    """Find clips of the same length and text whose audio is equal: the row, and the first's id."""
    names = [name for name in ("id", "samples", TEXT) if name in dataset.column_names]
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    seen: set[str] = set()
    columns = (each.to_pylist() for each in take_columns(dataset, *names).columns)
    for row, (utterance, *like) in enumerate(zip(*columns, strict=True)):
        if utterance not in seen:
            rows[tuple(like)].append(row)
        seen.add(utterance)
    alike = (each for each in rows.values() if len(each) > 1)
    chosen = list(islice((row for group in alike for row in group), COMPARED))
    first: dict[int, str] = {}
    found: dict[int, str] = {}
    for row, clip in zip(chosen, read_rows(dataset, chosen), strict=True):
        original = first.setdefault(hash(clip["audio"].tobytes()), clip["id"])
        if original != clip["id"]:
            found[row] = original
    return found

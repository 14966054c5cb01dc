"""Transcripts of a planned run, and findings about utterances."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.base.text import listed
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.transcripts import TextLabels, Transcripts, read_transcripts

TRAIN = "train"

Rows = npt.NDArray[np.int64]


def transcripts_of(planned: PlannedRun) -> dict[str, Transcripts]:
    """Return the transcripts of all splits, read once.

    Raises:
        MissingPartError: labels are not made of text: a check of transcripts does not apply.
    """
    labels = planned.labels
    if not isinstance(labels, TextLabels):
        raise MissingPartError("transcripts")
    return {name: read_transcripts(each, labels) for name, each in planned.splits.named().items()}


def about(
    planned: PlannedRun, check: str, key: str, found: Mapping[str, Rows], **words: Any
) -> Iterator[Finding]:
    """Make a finding of rows of splits, if there are any; `declared` says what each must do."""
    splits, counts, ids = planned.splits.named(), [], []
    for name, rows in found.items():
        if len(rows):
            counts.append(f"{len(rows):,} of {len(splits[name]):,} in {name}")
            ids += splits[name].select(rows)["id"][:]
    if ids:
        verb = "does" if len(ids) == 1 else "do"
        effect = f"{listed(counts)} {verb} not: {listed(ids, most=SHOWN)}"
        yield planned.finding(check, key, effect=effect, ids=tuple(ids), **words)

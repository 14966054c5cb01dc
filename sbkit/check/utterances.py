"""What the checks of the data share: every transcript, read once, and findings about utterances."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.splits import Excluded, report_excluded
from sbkit.data.transcripts import Transcripts, read_columns, read_transcripts

SHOWN = 5  # ids; more of them go into a file
DATA = "data"  # the check that these findings are of
LISTINGS = "check"  # the folder of such files, in the run's

Rows = npt.NDArray[np.int64]


def transcripts_of(planned: PlannedRun) -> dict[str, Transcripts]:
    """Read the transcripts of all splits, or give what was read before."""
    splits, tokenizer = planned.splits, planned.tokenizer
    return {name: read_transcripts(split, tokenizer) for name, split in splits.named().items()}


def named(
    planned: PlannedRun, split: str, rows: Rows, reason: str, details: Iterable[str] | None = None
) -> Iterator[Excluded]:
    """Name the utterances of some rows."""
    ids = planned.splits.named()[split].select(rows)["id"][:] if len(rows) else []
    for utterance, detail in zip(ids, details or [""] * len(rows), strict=True):
        yield Excluded(split, utterance, reason, detail)


def tables(planned: PlannedRun, split: str, *columns: str) -> Iterator[pa.Table]:
    """Give some columns of a split, run after run of rows."""
    return read_columns(planned.splits.named()[split], *columns, title=f"Reading {split}")


def about(
    planned: PlannedRun,
    check: str,
    *keys: str,
    found: Sequence[Excluded],
    effect: str,
    **words: Any,
) -> Iterator[Finding]:
    """Make a finding of utterances, if there are any; a long list goes into the run's folder."""
    if not found:
        return
    listing = _list(planned, found) if len(found) > SHOWN else None
    first = ", ".join(item.id for item in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more (all in {listing})" if len(found) > SHOWN else ""
    yield planned.finding(
        check,
        *keys,
        effect=f"{_count(planned, found)} {effect}: {first}{more}",
        ids=tuple(item.id for item in found),
        listing=listing,
        **words,
    )


def notice(planned: PlannedRun, key: str = "data_folder", **words: Any) -> Iterator[Finding]:
    """Make a finding about the data, over which no run is stopped: real corpora have some of it."""
    return about(planned, DATA, key, stops=False, **words)


def _count(planned: PlannedRun, found: Sequence[Excluded]) -> str:
    """Write how many there are, split by split: "3 of 419 in train and 1 of 55 in dev"."""
    counts = Counter(item.split for item in found)
    sizes = {name: len(planned.splits.named()[name]) for name in counts}
    return " and ".join(f"{count} of {sizes[name]} in {name}" for name, count in counts.items())


def _list(planned: PlannedRun, found: Sequence[Excluded]) -> str | None:
    if planned.run_folder is None:
        return None
    name = re.sub(r"\W+", "_", found[0].reason).strip("_")
    file = planned.run_folder / LISTINGS / f"{name}.tsv"
    report_excluded(found, file)
    return str(file)

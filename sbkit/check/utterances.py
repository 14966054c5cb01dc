"""What the checks of the data share: splits, transcripts read once, findings about utterances."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.check.finding import Finding, plural
from sbkit.check.listings import SHOWN
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.splits import Excluded
from sbkit.data.transcripts import Transcripts, read_columns, read_transcripts
from sbkit.text.tokenizer import Tokenizer

DATA = "data"  # the check that these findings are of
TRAIN = "train"
TEXT = "text"
SPEAKER = "speaker"
SINGULAR = {"have": "has", "are": "is", "hold": "holds", "repeat": "repeats"}

Rows = npt.NDArray[np.int64]


def datasets_of(planned: PlannedRun) -> dict[str, datasets.Dataset]:
    """Return the utterances of every split by its name, train first."""
    named: dict[str, datasets.Dataset] = planned.splits.named()
    return named


def excluded_of(planned: PlannedRun) -> Sequence[Excluded]:
    """Return the rows of the manifests that cannot be used."""
    excluded: Sequence[Excluded] = planned.splits.excluded
    return excluded


def out_of_range_of(planned: PlannedRun) -> Sequence[Excluded]:
    """Return the utterances of train that the declared limits leave out."""
    out_of_range: Sequence[Excluded] = planned.splits.out_of_range
    return out_of_range


def transcripts_of(planned: PlannedRun) -> dict[str, Transcripts]:
    """Return the transcripts of all splits, read once.

    Raises MissingPartError for a recipe without transcripts, to which their checks do not apply.
    """
    splits, tokenizer = datasets_of(planned), planned.tokenizer
    if not isinstance(tokenizer, Tokenizer) or any(
        TEXT not in each.column_names for each in splits.values()
    ):
        raise MissingPartError("transcripts")
    return {name: read_transcripts(each, tokenizer) for name, each in splits.items()}


def named(
    planned: PlannedRun, split: str, rows: Rows, reason: str, details: Iterable[str] | None = None
) -> Iterator[Excluded]:
    """Yield the utterances of some rows."""
    ids = datasets_of(planned)[split].select(rows)["id"][:] if len(rows) else []
    for utterance, detail in zip(ids, details or [""] * len(rows), strict=True):
        yield Excluded(split, utterance, reason, detail)


def tables(planned: PlannedRun, split: str, *columns: str) -> Iterator[pa.Table]:
    """Read some columns of a split, block after block of rows."""
    return read_columns(datasets_of(planned)[split], *columns, title=f"Reading {split}")


def about(
    planned: PlannedRun,
    check: str,
    *keys: str,
    found: Sequence[Excluded],
    effect: str,
    of_manifest: bool = False,
    **words: Any,
) -> Iterator[Finding]:
    """Make a finding of utterances, if there are any.

    effect: what follows their count, a verb in the plural first;
    of_manifest: count them among all rows of the manifests; else among the utterances in use.
    """
    if not found:
        return
    shown = ", ".join(_shown(item) for item in found[:SHOWN])
    more = f" and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    yield planned.finding(
        check,
        *keys,
        effect=f"{_count(planned, found, of_manifest=of_manifest)} {_agreeing(effect, found)}: "
        f"{shown}{more}",
        utterances=tuple(found),
        **words,
    )


def notice(planned: PlannedRun, key: str = "data_folder", **words: Any) -> Iterator[Finding]:
    """Make a note about the data, over which no run is stopped: real corpora have some of it."""
    return about(planned, DATA, key, stops=False, **words)


def _shown(item: Excluded) -> str:
    return f"{item.id} ({item.detail})" if item.detail else item.id


def _count(planned: PlannedRun, found: Sequence[Excluded], *, of_manifest: bool) -> str:
    """Write how many there are, split by split: "3 of 419 in train and 1 of 55 in dev"."""
    counts = Counter(item.split for item in found)
    sizes = Counter({name: len(each) for name, each in datasets_of(planned).items()})
    if of_manifest:
        sizes += Counter(item.split for item in (*excluded_of(planned), *out_of_range_of(planned)))
    what = {
        name: plural(size, "row") if of_manifest else f"{size:,}" for name, size in sizes.items()
    }
    parts = [f"{count:,} of {what[name]} in {name}" for name, count in counts.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _agreeing(effect: str, found: Sequence[Excluded]) -> str:
    """Put the verb into the singular where there is one utterance."""
    verb, _, rest = effect.partition(" ")
    return f"{SINGULAR.get(verb, verb) if len(found) == 1 else verb} {rest}"

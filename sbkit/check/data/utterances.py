"""What the checks of the data share: splits, transcripts read once, findings about utterances."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.base.text import listed, plural
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.splits import Excluded
from sbkit.data.corpora.transcripts import TextLabels, Transcripts, read_columns, read_transcripts

DATA = "data"  # the check that these findings are of
TRAIN = "train"
TEXT = "text"
SPEAKER = "speaker"
SINGULAR = {"have": "has", "are": "is", "hold": "holds", "repeat": "repeats"}

Rows = npt.NDArray[np.int64]


def transcripts_of(planned: PlannedRun) -> dict[str, Transcripts]:
    """Return the transcripts of all splits, read once.

    Raises MissingPartError where utterances have no text or labels are not made of it: a check
    of transcripts does not apply.
    """
    splits, labels = planned.splits.named(), planned.labels
    has_text = all(TEXT in each.column_names for each in splits.values())
    if not has_text or not isinstance(labels, TextLabels):
        raise MissingPartError("transcripts")
    return {name: read_transcripts(each, labels) for name, each in splits.items()}


def named(
    planned: PlannedRun,
    rows: Mapping[str, Rows],
    reason: str,
    detail: Callable[[str, int], str] = lambda split, row: "",
) -> list[Excluded]:
    """List the utterances of some rows of every split; ``detail`` gets a split and a row."""
    splits = planned.splits.named()
    return [
        Excluded(split, utterance, reason, detail(split, row))
        for split, chosen in rows.items()
        if len(chosen)
        for row, utterance in zip(
            chosen.tolist(), splits[split].select(chosen)["id"][:], strict=True
        )
    ]


def tables(planned: PlannedRun, split: str, *columns: str) -> Iterator[pa.Table]:
    """Read some columns of a split, block after block of rows."""
    return read_columns(planned.splits.named()[split], *columns, title=f"Reading {split}")


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
    shown = (f"{each.id} ({each.detail})" if each.detail else each.id for each in found)
    if len(found) == 1:
        verb, _, rest = effect.partition(" ")
        effect = f"{SINGULAR.get(verb, verb)} {rest}"
    yield planned.finding(
        check,
        *keys,
        effect=f"{_count(planned, found, of_manifest=of_manifest)} {effect}: "
        f"{listed(shown, most=SHOWN)}",
        utterances=tuple(found),
        **words,
    )


def notice(planned: PlannedRun, key: str = "data_folder", **words: Any) -> Iterator[Finding]:
    """Make a note about the data, over which no run is stopped: real corpora have some of it."""
    return about(planned, DATA, key, stops=False, **words)


def _count(planned: PlannedRun, found: Sequence[Excluded], *, of_manifest: bool) -> str:
    """Write how many there are, split by split: "3 of 419 in train and 1 of 55 in dev"."""
    counts = Counter(item.split for item in found)
    sizes = Counter({name: len(each) for name, each in planned.splits.named().items()})
    if of_manifest:
        sizes += Counter(
            item.split for item in (*planned.splits.excluded, *planned.splits.out_of_range)
        )
    what = {
        name: plural(size, "row") if of_manifest else f"{size:,}" for name, size in sizes.items()
    }
    parts = [f"{count:,} of {what[name]} in {name}" for name, count in counts.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)

"""What the checks of the data share: transcripts read once, and findings about utterances."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.base.text import listed, plural
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.corpora.splits import Excluded
from sbkit.data.corpora.transcripts import TextLabels, Transcripts, read_transcripts

TRAIN, TEXT = "train", "text"
SINGULAR = {"have": "has", "are": "is", "hold": "holds", "repeat": "repeats"}

Rows = npt.NDArray[np.int64]
Detail = Callable[[str, int], str]  # of a split and a row


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
    planned: PlannedRun,
    *keys: str,
    found: Mapping[str, Rows] | Sequence[Excluded],
    effect: str,
    check: str = "data",
    reason: str = "",
    detail: Detail = lambda split, row: "",
    **words: Any,
) -> Iterator[Finding]:
    """Make a finding of utterances, if there are any.

    Args:
        planned: the run.
        keys: of the YAML, where the fault is.
        found: the rows of each split; or what preparation left out, as it names it.
        effect: what follows their count, a verb in the plural first.
        check: the name of the check.
        reason: what is wrong with each of them.
        detail: what is said of each of them.
        words: further fields of the finding.
    """
    of_manifest = not isinstance(found, Mapping)
    named = _named(planned, found, reason, detail) if isinstance(found, Mapping) else found
    if not named:
        return
    shown = (f"{each.id} ({each.detail})" if each.detail else each.id for each in named)
    if len(named) == 1:
        verb, _, rest = effect.partition(" ")
        effect = f"{SINGULAR.get(verb, verb)} {rest}"
    yield planned.finding(
        check,
        *keys,
        effect=f"{_count(planned, named, of_manifest=of_manifest)} {effect}: "
        f"{listed(shown, most=SHOWN)}",
        utterances=tuple(named),
        **words,
    )


def notice(planned: PlannedRun, key: str = "data_folder", **words: Any) -> Iterator[Finding]:
    """Make a note about the data, which stops no run: real corpora have some of it."""
    return about(planned, key, stops=False, **words)


def _named(
    planned: PlannedRun, rows: Mapping[str, Rows], reason: str, detail: Detail
) -> list[Excluded]:
    splits = planned.splits.named()
    return [
        Excluded(split, id, reason, detail(split, row))
        for split, chosen in rows.items()
        for row, id in zip(chosen.tolist(), splits[split].select(chosen)["id"][:], strict=True)
    ]


def _count(planned: PlannedRun, found: Sequence[Excluded], *, of_manifest: bool) -> str:
    """Write how many there are, split by split: "3 of 419 in train and 1 of 55 in dev"."""
    counts = Counter(item.split for item in found)
    sizes = Counter({name: len(each) for name, each in planned.splits.named().items()})
    if of_manifest:
        left_out = (*planned.splits.excluded, *planned.splits.out_of_range)
        sizes += Counter(item.split for item in left_out)
    what = {n: plural(size, "row") if of_manifest else f"{size:,}" for n, size in sizes.items()}
    parts = [f"{count:,} of {what[name]} in {name}" for name, count in counts.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)

"""Duplicates: clips within a split; sentences, clips and speakers that two splits share.

A score on what is in the training set, too, measures memory.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.check.data.utterances import SPEAKER, TEXT, Rows, named, notice, tables
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import sample_counts, take_columns
from sbkit.data.corpora.splits import Excluded
from sbkit.data.storage.audio_store import read_rows

COMPARED = 2000  # clips of a split whose audio is compared; about 300 MB are read


def check_duplicates(planned: PlannedRun) -> Iterator[Finding]:
    """Find rows with the id of another row of their split, and clips that are copies."""
    splits = planned.splits.named()
    repeated = {name: _repeated_ids(split) for name, split in splits.items()}
    yield from notice(
        planned,
        found=named(planned, repeated, "repeated id"),
        declared="every row must have an id (the clip's name without its ending) of its own",
        effect="repeat the id of a row before",
        fix="Take the repeated rows out, or rename the clips.",
    )
    copies = {name: _copies(split) for name, split in splits.items()}
    rows = {name: np.array(list(each), dtype=np.int64) for name, each in copies.items()}
    yield from notice(
        planned,
        found=named(planned, rows, "copied clip", lambda split, row: f"of {copies[split][row]}"),
        declared="every clip must be recorded once",
        effect="are equal, sample for sample, to another clip of the same split",
        fix="Take the copies out: a clip that is there twice counts twice.",
    )


def _repeated_ids(split: datasets.Dataset) -> Rows:
    ids = np.asarray(split["id"][:])
    first = np.unique(ids, return_index=True)[1]
    return np.setdiff1d(np.arange(len(ids)), first)


def _copies(dataset: datasets.Dataset) -> dict[int, str]:
    """Find clips of the same length and text whose audio is equal: the row, and the first's id."""
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
    first: dict[int, str] = {}
    found: dict[int, str] = {}
    chosen = list(islice(compared, COMPARED))
    for row, clip in zip(chosen, read_rows(dataset, chosen), strict=True):
        original = first.setdefault(hash(clip["audio"].tobytes()), clip["id"])
        if original != clip["id"]:
            found[row] = original
    return found


def check_sentences(planned: PlannedRun) -> Iterator[Finding]:
    """Find normalized sentences that are in two splits."""
    yield from notice(
        planned,
        found=list(_shared(planned, TEXT, "sentence in another split")),
        declared="a sentence must be in one split only",
        effect="have the sentence of an utterance in an earlier split",
        fix="Keep each sentence in one split.",
    )


def check_clips(planned: PlannedRun) -> Iterator[Finding]:
    """Find clips that are in two splits: of one id, and of one length.

    Corpora number the clips of each speaker or language anew: an id alone says little.
    """
    found = list(_shared(planned, "id", "clip in another split"))
    splits = planned.splits.named() if found else {}
    lengths = {
        name: dict(zip(each["id"][:], sample_counts(each).tolist(), strict=True))
        for name, each in splits.items()
    }
    yield from notice(
        planned,
        found=[
            each for each in found if lengths[each.split][each.id] == lengths[each.detail][each.id]
        ],
        declared="a clip must be in one split only",
        effect="are in an earlier split too, by id and length",
        fix="Keep each clip in one split.",
    )


def check_speakers(planned: PlannedRun) -> Iterator[Finding]:
    """Find speakers in two splits, unless there is only one speaker, whom no split can part."""
    if not _has(planned, SPEAKER):
        return
    speakers = {
        speaker
        for name in planned.splits.named()
        for table in tables(planned, name, SPEAKER)
        for speaker in pc.unique(table[SPEAKER]).to_pylist()
    }
    if len(speakers - {""}) > 1:
        yield from notice(
            planned,
            found=list(_shared(planned, SPEAKER, "speaker in another split")),
            declared="a speaker must be in one split only",
            effect="are by a speaker who is in an earlier split too",
            fix="Keep each speaker in one split.",
        )


def _has(planned: PlannedRun, column: str) -> bool:
    return all(column in each.column_names for each in planned.splits.named().values())


def _shared(planned: PlannedRun, column: str, reason: str) -> Iterator[Excluded]:
    """Yield each utterance whose value is also in a split before its own, once."""
    if not _has(planned, column):
        return
    names = list(planned.splits.named())
    for place, split in enumerate(names):
        before = {name: _common(planned, name, split, column) for name in names[:place]}
        common = {name: values for name, values in before.items() if values}
        for table in tables(planned, split, *dict.fromkeys(("id", column))) if common else ():
            yield from _marked(table, column, common, split, reason)


def _marked(
    table: pa.Table, column: str, common: dict[str, set[str]], split: str, reason: str
) -> Iterator[Excluded]:
    pairs = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
    for utterance, value in pairs:
        where = next((name for name, values in common.items() if value in values), None)
        if where is not None:
            shown = where if column == "id" else f"{where}: {value}"
            yield Excluded(split, utterance, reason, shown)


def _common(planned: PlannedRun, one: str, other: str, column: str) -> set[str]:
    """Return the values that are in both splits; those of the second are held in memory."""
    values = pa.concat_arrays(
        [pc.unique(table[column]) for table in tables(planned, other, column)]
    ).unique()
    found = [
        pc.unique(table[column]).filter(pc.is_in(pc.unique(table[column]), value_set=values))
        for table in tables(planned, one, column)
    ]
    return {*pa.concat_arrays(found).to_pylist()} - {"", None}

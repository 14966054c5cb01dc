"""Sentences, clips and speakers that are in two splits, where a score would measure memory."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.check.data.utterances import SPEAKER, TEXT, notice, tables
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.columns import sample_counts
from sbkit.data.splits import Excluded


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
        common = {name: values for name, values in before.items() if len(values)}
        for table in tables(planned, split, *dict.fromkeys(("id", column))) if common else ():
            yield from _marked(table, column, common, split, reason)


def _marked(
    table: pa.Table, column: str, common: dict[str, pa.Array], split: str, reason: str
) -> Iterator[Excluded]:
    values = [set(each.to_pylist()) for each in common.values()]
    pairs = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
    for utterance, value in pairs:
        where = [name for name, those in zip(common, values, strict=True) if value in those]
        if where:
            shown = where[0] if column == "id" else f"{where[0]}: {value}"
            yield Excluded(split, utterance, reason, shown)


def _common(planned: PlannedRun, one: str, other: str, column: str) -> pa.Array:
    """Return the values that are in both splits; those of the second are held in memory."""
    values = pa.concat_arrays(
        [pc.unique(table[column]) for table in tables(planned, other, column)]
    ).unique()
    found = [
        pc.unique(table[column]).filter(pc.is_in(pc.unique(table[column]), value_set=values))
        for table in tables(planned, one, column)
    ]
    common = pa.concat_arrays(found).unique()
    return common.filter(pc.not_equal(common, ""))

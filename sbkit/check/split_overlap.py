"""Sentences and speakers that are in two splits, where a score would tell of memory."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.check.utterances import notice, tables
from sbkit.data.splits import Excluded

CROSSINGS = (("train", "dev"), ("train", "test"), ("dev", "test"))


def check_sentences(planned: PlannedRun) -> Iterator[Finding]:
    """Tell of normalized sentences in two splits."""
    yield from notice(
        planned,
        found=list(_shared(planned, "text", "sentence in another split")),
        declared="dev and test hold sentences that training never saw",
        effect="have the sentence of an utterance in another split",
        fix="Keep each sentence in one split.",
    )


def check_speakers(planned: PlannedRun) -> Iterator[Finding]:
    """Tell of speakers in two splits, unless there is only one speaker, whom no split can part."""
    speakers = {
        speaker
        for name in planned.splits.named()
        for table in tables(planned, name, "speaker")
        for speaker in pc.unique(table["speaker"]).to_pylist()
    }
    if len(speakers - {""}) > 1:
        yield from notice(
            planned,
            found=list(_shared(planned, "speaker", "speaker in another split")),
            declared="dev and test hold speakers that training never heard",
            effect="are by a speaker who is in another split too",
            fix="Keep each speaker (speaker) in one split.",
        )


def _shared(planned: PlannedRun, column: str, reason: str) -> Iterator[Excluded]:
    """Name the utterances of dev and test whose value is also in a split before."""
    for before, split in CROSSINGS:
        common = _common(planned, before, split, column)
        for table in tables(planned, split, "id", column) if len(common) else ():
            table = table.filter(pc.is_in(table[column], value_set=common))
            pairs = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
            for utterance, value in pairs:
                yield Excluded(split, utterance, reason, f"{before}: {value}")


def _common(planned: PlannedRun, one: str, other: str, column: str) -> pa.Array:
    """Give the values that are in both splits, the smaller of which is held in memory."""
    values = pa.concat_arrays(
        [pc.unique(table[column]) for table in tables(planned, other, column)]
    ).unique()
    found = [
        pc.unique(table[column]).filter(pc.is_in(pc.unique(table[column]), value_set=values))
        for table in tables(planned, one, column)
    ]
    common = pa.concat_arrays(found).unique()
    return common.filter(pc.not_equal(common, ""))

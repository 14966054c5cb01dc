"""Sentences and speakers that are in two splits, where a score would tell of memory."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.check.finding import Finding
from sbkit.check.subject import Subject
from sbkit.check.utterances import notice, tables
from sbkit.data.splits import SPLITS, LeftOut

CROSSINGS = (("train", "dev"), ("train", "test"), ("dev", "test"))


def check_sentences(subject: Subject) -> Iterator[Finding]:
    """Tell of normalized sentences in two splits."""
    yield from notice(
        subject,
        found=list(_shared(subject, "text", "sentence in another split")),
        declared="dev and test hold sentences that training never saw",
        effect="have the sentence of an utterance in another split",
        mend="Keep each sentence in one split.",
    )


def check_speakers(subject: Subject) -> Iterator[Finding]:
    """Tell of speakers in two splits, unless there is only one speaker, whom no split can part."""
    speakers = {
        speaker
        for name in SPLITS
        for table in tables(subject, name, "client_id")
        for speaker in pc.unique(table["client_id"]).to_pylist()
    }
    if len(speakers - {""}) > 1:
        yield from notice(
            subject,
            found=list(_shared(subject, "client_id", "speaker in another split")),
            declared="dev and test hold speakers that training never heard",
            effect="are by a speaker who is in another split too",
            mend="Keep each speaker (client_id) in one split.",
        )


def _shared(subject: Subject, column: str, reason: str) -> Iterator[LeftOut]:
    """Name the utterances of dev and test whose value is also in a split before."""
    for before, split in CROSSINGS:
        common = _common(subject, before, split, column)
        for table in tables(subject, split, "id", column) if len(common) else ():
            table = table.filter(pc.is_in(table[column], value_set=common))
            pairs = zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)
            for utterance, value in pairs:
                yield LeftOut(split, utterance, reason, f"{before}: {value}")


def _common(subject: Subject, one: str, other: str, column: str) -> pa.Array:
    """Give the values that are in both splits, the smaller of which is held in memory."""
    values = pa.concat_arrays(
        [pc.unique(table[column]) for table in tables(subject, other, column)]
    ).unique()
    found = [
        pc.unique(table[column]).filter(pc.is_in(pc.unique(table[column]), value_set=values))
        for table in tables(subject, one, column)
    ]
    common = pa.concat_arrays(found).unique()
    return common.filter(pc.not_equal(common, ""))

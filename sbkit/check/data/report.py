"""What the report of the data says of rows left out and shared, and whether clips are silent."""

from collections.abc import Iterator

import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.base.text import listed, plural
from sbkit.check.data.utterances import about
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import spread_rows
from sbkit.data.report import measure_data
from sbkit.data.storage.audio_store import read_clips

CHECK, KEY = "data", "data_folder"
# What splits may not share, by its column.
NAMES = {"audio": "clip", "text": "sentence", "speaker": "speaker"}
MANY_SHARED = 0.5  # of a set's clips that were trained on, with which its score means nothing
MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
SAMPLED = 500  # utterances of a split, evenly spread over it, whose audio is looked at
SILENT = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale


def check_report(planned: PlannedRun) -> Iterator[Finding]:
    """Find rows that are left out, and clips, sentences and speakers in two splits."""
    splits, language = planned.splits, planned.knobs.get("language")
    facts = measure_data(splits, sample_rate=planned.knobs["sample_rate"], language=language)
    few = MANY_OUTSIDE * (len(splits.out_of_range) + len(splits.train))
    outside = {each.reason for each in splits.out_of_range if len(splits.out_of_range) > few}
    unusable = {each.reason for each in splits.excluded}
    for each in facts["left_out"]:
        if each["reason"] in outside | unusable:
            shown = (f"{item['id']} ({item['detail']})" for item in each["examples"])
            count = each["utterances"]
            yield planned.finding(
                CHECK,
                "max_seconds" if each["reason"] in outside else KEY,
                declared=f"every row of {each['split']} must be usable",
                effect=f"{plural(count, 'row')} {'is' if count == 1 else 'are'} left out "
                f"({each['reason']}): {listed(shown)}",
                fix="Repair these rows or clips, or widen `min_seconds` and `max_seconds`.",
                stops=False,
            )
    for each in facts["shared"]:
        what, (one, other) = NAMES.get(each["column"]), each["splits"]
        only_one = what == "speaker" and facts["speakers"] == 1  # whom no split can part
        if what and each["values"] and not only_one:
            is_trained = what == "clip" and one == "train"
            yield planned.finding(
                CHECK,
                KEY,
                declared=f"a {what} must be in one split only: a score on what was trained on "
                "measures memory",
                effect=f"{each['values']:,} of {plural(each['of'], what)} in {other} "
                f"{'is' if each['values'] == 1 else 'are'} in {one}, too: "
                f"{listed(each['examples'], most=SHOWN)}",
                fix=f"Keep each {what} in one split.",
                stops=is_trained and each["values"] > MANY_SHARED * each["of"],
            )


def check_silence(planned: PlannedRun) -> Iterator[Finding]:
    """Find silent clips among some of each split."""
    silent = {}
    for name, split in planned.splits.named().items():
        rows = spread_rows(len(split), SAMPLED)
        peaks = [np.abs(c.astype(np.int32)).max(initial=0) for c in read_clips(split, rows)]
        silent[name] = np.array(rows, np.int64)[np.array(peaks) < SILENT]
    yield from about(
        planned,
        CHECK,
        KEY,
        silent,
        declared=f"every clip must hold sound (up to {SAMPLED} of each split were looked at)",
        fix="Record them again, or take them out.",
        stops=False,
    )

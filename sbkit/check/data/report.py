"""What the report of the data says of rows left out and shared, of letters, and of silence."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.base.text import listed, plural
from sbkit.check.data.utterances import about
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.columns import spread_rows
from sbkit.data.report import measure_data
from sbkit.data.storage.audio_store import read_clips
from sbkit.text.normalize import languages_with

CHECK, KEY = "data", "data_folder"
# What splits may not share, by its column.
NAMES = {"audio": "clip", "text": "sentence", "speaker": "speaker"}
MANY_SHARED = 0.5  # of a set's clips that were trained on, with which its score means nothing
MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
SAMPLED = 500  # utterances of a split, evenly spread over it, whose audio is looked at
# Of the letters of the default corpus, the English table replaces 0.24 % in Spanish (whose prompts
# have few accents), 0.54 % in Italian, 3.55 % in French, and none in English.
MAX_REPLACED = 0.001
MIN_REPLACED = 20  # letters; fewer are loan words of a small corpus
SILENT = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale


def check_report(planned: PlannedRun) -> Iterator[Finding]:
    """Find rows that are left out, and clips, sentences and speakers in two splits."""
    splits, language = planned.splits, planned.knobs.get("language")
    facts = measure_data(splits, sample_rate=planned.knobs["sample_rate"], language=language)
    yield from _check_letters(planned, facts["splits"].values())
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


def _check_letters(planned: PlannedRun, splits: Collection[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find letters that the text table of the language replaced by others."""
    replaced = sum((Counter(split["replaced"]) for split in splits), Counter[str]())
    if not replaced:
        return
    count, share = replaced.total(), replaced.total() / sum(split["letters"] for split in splits)
    fitting = languages_with(replaced)
    stops = share > MAX_REPLACED and count >= MIN_REPLACED and bool(fitting)
    letters = (f"{number} {letter}" for letter, number in replaced.most_common())
    yield planned.finding(
        CHECK,
        "language",
        declared="the text table of `language` must have the letters of the transcripts",
        effect=f"it replaces {plural(count, 'letter')} of them ({share:.2%}): "
        f"{listed(letters, most=2 * SHOWN)}",
        fix=f"Languages whose tables have these letters: {listed(fitting)}. Pass "
        f"--language={fitting[0]}, or write the transcripts in the letters to train on."
        if stops
        else "Loan words, and spellings that the table unifies, need nothing done.",
        stops=stops,
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

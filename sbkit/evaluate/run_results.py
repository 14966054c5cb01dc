"""What a tested run left in its folder, as the page of a report needs it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.evaluate.utterances import read_utterances, utterances_file
from sbkit.evaluate.wer import Scored
from sbkit.logs.log import LOG_FILE, Record, read_log

DATA_REPORT = "data_report.json"
LARGEST = 64 << 20  # bytes
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """A run, or a folder of scores.

    name: the end of its folder; test: the figures of each test set, as in ``summary.json``;
    utterances: those of each test set of a recognizer; log: what training logged; data: what the
    data is, where it was measured.
    """

    name: str
    test: Mapping[str, Mapping[str, Any]]
    utterances: Mapping[str, Sequence[Scored]]
    log: Sequence[Record]
    data: Mapping[str, Any] | None


def read_results(folder: Path, test: Mapping[str, Mapping[str, Any]]) -> RunResults:
    """Read the files of a folder; ``test`` holds the figures of its test sets.

    Raises:
        SbkitError: a file is not what its name says.
    """
    files = {name: utterances_file(folder, name) for name in test}
    return RunResults(
        name="/".join(folder.absolute().parts[-3:]),
        test=test,
        utterances={name: read_utterances(file) for name, file in files.items() if file.exists()},
        log=read_log(folder / LOG_FILE),
        data=_read_data(folder / DATA_REPORT),
    )


def _read_data(file: Path) -> Mapping[str, Any] | None:
    if not file.exists():
        return None
    try:
        facts = json.loads(read_regular(file, largest=LARGEST, what="The report of a run's data"))
        if not {"splits", "left_out", "shared"} <= facts.keys():
            raise KeyError("splits, left_out, shared")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{file} must be what sbkit wrote about the data, but is not ({error}). Remove it; the "
            "next call of training writes it again."
        ) from error
    return dict(facts)


def read_clips(page: Path) -> dict[str, dict[str, str]]:
    """Return the MP3 in base64 of every clip of a report, by test set and id; none without a page.

    Raises:
        SbkitError: it is no page of a report.
    """
    if not page.exists():
        return {}
    content = read_regular(page, largest=LARGEST, what="The page of a report")
    try:
        found = DATA.search(content.decode())
        sets = json.loads(found[1] if found else "")["sets"]
        clips = {
            str(name): {str(row["id"]): row["clip"] for row in rows if row["clip"] is not None}
            for name, rows in sets.items()
        }
        if not all(BASE64.fullmatch(clip) for of in clips.values() for clip in of.values()):
            raise ValueError("a clip is not in base64")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{page} must be the page that sbkit wrote, whose clips can be heard, but is another "
            f"({error}). Remove it, or score again: sbkit score RUN DATA --out DIR."
        ) from error
    return clips

"""What a tested run left in its folder, as the page of a report needs it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.evaluate.utterances import read_utterances, utterances_file
from sbkit.evaluate.wer import Scored
from sbkit.logs.log import LOG_FILE, Record, read_log

FIGURES = ("summary.json", "scores.json")  # of a run, of `sbkit score --out`
DATA_REPORT = "data_report.json"
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


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


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of every test set of a run, or of a folder of scores.

    Raises:
        SbkitError: there are none.
    """
    for file in (folder / name for name in FIGURES):
        if file.exists():
            test: dict[str, dict[str, Any]] = json.loads(file.read_bytes())["test"]
            return test
    raise SbkitError(
        f"{folder} must be a run that was tested, or a folder of scores, but has neither "
        f"{' nor '.join(FIGURES)}. Finish the run, or: sbkit score RUN DATA --out DIR."
    )


def read_results(folder: Path, test: Mapping[str, Mapping[str, Any]]) -> RunResults:
    """Read the files of a folder; ``test`` holds the figures of its test sets.

    Raises:
        SbkitError: the utterances of a test set cannot be read.
    """
    files = {name: utterances_file(folder, name) for name in test}
    data = folder / DATA_REPORT
    return RunResults(
        name="/".join(folder.absolute().parts[-3:]),
        test=test,
        utterances={name: read_utterances(file) for name, file in files.items() if file.exists()},
        log=read_log(folder / LOG_FILE),
        data=json.loads(data.read_bytes()) if data.exists() else None,
    )


def read_clips(page: Path) -> dict[str, dict[str, str]]:
    """Return the MP3 in base64 of every clip of a report, by test set and id; none without a page.

    Raises:
        SbkitError: the page is no report.
    """
    if not page.exists():
        return {}
    found = DATA.search(page.read_text("utf-8"))
    if found is None:
        raise SbkitError(
            f"{page} must be a page that sbkit wrote, whose clips can be played, but is another. "
            "Remove it, or score again: sbkit score RUN DATA --out DIR."
        )
    return {
        name: {row["id"]: row["clip"] for row in rows if row["clip"] is not None}
        for name, rows in json.loads(found[1])["sets"].items()
    }

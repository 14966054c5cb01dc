"""The results of a test, in a run or elsewhere: ``summary.json``, and the data of its report."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sbkit.base.errors import BundleError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.machine import cpu_name, usable_cores
from sbkit.base.versions import git_commit, versions
from sbkit.evaluate.wer import FigureDict, ScoredUtterance
from sbkit.evaluate.wer_report import read_utterances, utterances_file
from sbkit.logs.run_log import LOG_FILE, Record, read_log

SUMMARY = "summary.json"  # of a run, and of `sbkit score --out`
RUN_CONFIG_FILE = "run_config.json"  # what a run was begun with
DATA_REPORT = "data_report.json"
PAGE_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def write_summary(path: Path, *, test: Mapping[str, FigureDict], device: str, **facts: Any) -> None:
    """Write the figures of each test set as JSON, with facts about the model and its training.

    device: where the model was tested.
    """
    accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    summary = {
        "test": test,
        **facts,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "device": device,
            "accelerator": accelerator,
        },
    }
    write_text_atomically(path, to_json(summary, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The results of a run, or of a folder of scores.

    Attributes:
        name: the end of its path.
        test: the figures of each test set, as in ``summary.json``.
        utterances: of each test set of a recognizer.
        log: the records that training logged.
        data: the figures of the data report, if there is one.
    """

    name: str
    test: Mapping[str, FigureDict]
    utterances: Mapping[str, Sequence[ScoredUtterance]]
    log: Sequence[Record]
    data: FigureDict | None


def read_results(
    folder: Path,
    test: Mapping[str, FigureDict] | None = None,
    utterances: Mapping[str, Sequence[ScoredUtterance]] | None = None,
) -> RunResults:
    """Read the results in a folder, except for figures and utterances that are known.

    Raises BundleError if there are no figures, DataError if the utterances cannot be read.
    """
    if test is None:
        summary = folder / SUMMARY
        if not summary.exists():
            raise BundleError(
                f"{folder} has no {SUMMARY}. Finish the run, or: sbkit score RUN DATA --out DIR."
            )
        test = dict(json.loads(summary.read_bytes())["test"])
    if utterances is None:
        files = {name: utterances_file(folder, name) for name in test}
        utterances = {name: read_utterances(file) for name, file in files.items() if file.exists()}
    data_report = folder / DATA_REPORT
    return RunResults(
        name="/".join(folder.absolute().parts[-3:]),
        test=test,
        utterances=utterances,
        log=read_log(folder / LOG_FILE),
        data=json.loads(data_report.read_bytes()) if data_report.exists() else None,
    )


def read_clips(page: Path) -> dict[str, dict[str, str]]:
    """Return the clips of a report as MP3 in base64, by test set and id; {} without a report."""
    match = PAGE_DATA.search(page.read_text("utf-8")) if page.exists() else None
    sets = json.loads(match[1])["sets"] if match else {}
    return {
        name: {row["id"]: row["clip"] for row in rows if row["clip"] is not None}
        for name, rows in sets.items()
    }

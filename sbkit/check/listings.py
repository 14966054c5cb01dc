"""Lists of the utterances that findings are about, written by a run that starts."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sbkit.check.finding import Finding
from sbkit.data.splits import write_excluded

FOLDER = "check"  # in the run's
SHOWN = 5  # ids in a sentence; more of them go into a file


def write_listings(findings: Iterable[Finding], run_folder: Path | None) -> Iterator[Path | None]:
    """Write a TSV of each finding about more utterances than its sentence names; yield its path."""
    for finding in findings:
        if run_folder is None or len(finding.utterances) <= SHOWN:
            yield None
            continue
        name = re.sub(r"\W+", "_", finding.utterances[0].reason).strip("_")
        file = run_folder / FOLDER / f"{name}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_excluded(file, finding.utterances)
        yield file

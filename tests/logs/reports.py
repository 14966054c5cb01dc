"""A small report with an audible clip and a hostile transcript."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.evaluate.report import write_report
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import figures_of_test_set, slice_figures
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.recognized_word import Word

HOSTILE = "</script><script>alert(1)</script><img/src=x/onerror=alert(1)>'\""
SAID = "hold the line please"
HEARD = (
    Word("told", 0.2, 0.5, 0.35),
    Word("the", 0.6, 0.9, 0.95),
    Word("line", 1.0, 1.3, 0.9),
    Word("now", 1.35, 1.6, 0.4),
    Word("please", 1.7, 2.0, 0.99),
)
HYPOTHESIS = " ".join(word.text for word in HEARD)
UTTERANCES = [  # only the second can be heard
    ScoredUtterance(HOSTILE, f"{HOSTILE} two", f"{HOSTILE} two", speaker=HOSTILE),
    ScoredUtterance("c", SAID, HYPOTHESIS, speaker="ann", seconds=2.0, words=HEARD),
    ScoredUtterance("a", "=1+1", ""),
]


def results(scored: list[ScoredUtterance]) -> dict[str, Any]:
    """Make the results of a run with one test set."""
    by = {"speaker": {HOSTILE: {"utterances": 1, **slice_figures(scored[:1])}}}
    return {
        "title": HOSTILE,
        "metrics": AsrTask.metrics,
        "test": {"test": {**figures_of_test_set(scored).plain(), "report_by": by}},
        "utterances": {"test": scored},
    }


def tone() -> str:
    """Make a second of a tone and a second of silence."""
    seconds = np.arange(32_000) / 16_000
    content, audio = io.BytesIO(), np.where(seconds < 1, np.sin(2 * np.pi * 1000 * seconds) / 4, 0)
    soundfile.write(content, audio, 16_000, format="MP3")
    return base64.b64encode(content.getvalue()).decode()


def write_example(folder: Path) -> Path:
    page = folder / "report.html"
    write_report(page, **results(UTTERANCES), clips=lambda *_: {"c": tone()}, notes=[HOSTILE])
    return page

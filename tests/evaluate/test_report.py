"""The page of a report as a file: its content, its size and its safety."""

import base64
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sbkit.evaluate import report
from sbkit.evaluate.report import confusions, order_by_use, row, write_report
from sbkit.evaluate.wer import FigureDict, ScoredUtterance, pair_units
from sbkit.evaluate.wer_report import slice_figures
from sbkit.logs.metric import Metric
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.recognized_word import Word
from tests.logs.reports import results, tone, write_example


def test_page_shows_figures_and_escapes_hostile_text(tmp_path: Path) -> None:
    page = write_example(tmp_path).read_text("utf-8")
    assert "42.9 %" in page  # WER: 3 errors in 7 words
    links = re.findall(r'(?:src|href)="(.{5})', page.partition('<script type="application')[0])
    assert {link for link in links if not link.startswith("#")} == {"data:"}
    assert page.count("<script") == 2
    assert re.findall(r"https?://|<iframe|<object| style=", page) == []
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    for name, content in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;;")


def test_page_has_at_most_six_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_ROW_BYTES", 20_000)
    monkeypatch.setattr(report, "MAX_BYTES", 100_000)
    scored = [ScoredUtterance(str(n), "one two", "one too" if n % 3 else "two") for n in range(500)]
    requests: list[tuple[int, int]] = []

    def clips(name: str, ids: list[str], max_bytes: int) -> dict[str, str]:
        requests.append((len(ids), max_bytes))
        return dict.fromkeys(ids, "A" * 400)

    page = tmp_path / "report.html"
    write_report(page, **results(scored), clips=clips)
    ((count, max_bytes),) = requests
    assert 50 < count < 200  # as many as have rows
    assert 80_000 <= max_bytes < 81_000
    static = len(write_example(tmp_path / "..").read_bytes()) - len(tone())
    assert page.stat().st_size < static + 20_000 + 400 * count


def test_row_has_times_in_milliseconds_and_the_greedy_text_if_it_is_another() -> None:
    words = (Word("one", 0.12345, 1.98765, 0.9),)
    heard = row(ScoredUtterance("a", "one", "one", words=words), {})["heard"]
    assert heard == [[0.123, 1.988, 0.9]]
    greedy = [ScoredUtterance("a", "one two", text) for text in ("one too", "one two")]
    rows = [row(ScoredUtterance("a", "one two", "one two", greedy=other), {}) for other in greedy]
    assert [row["greedy"] for row in rows] == ["one too", None]


def page_of(folder: Path, test: dict[str, FigureDict], **options: Any) -> str:
    page = f"{folder}/report.html"
    options = {"metrics": AsrTask.metrics, **options}
    write_report(page, title="x", test=test, utterances={}, clips=lambda *_: {}, **options)
    return (folder / "report.html").read_text("utf-8")


def test_page_shows_the_largest_slices(tmp_path: Path) -> None:
    figures = {**slice_figures([ScoredUtterance("a", "a b", "a c")]), "utterances": 1}
    values = {f"speaker {n:05}": figures for n in range(20_000)}
    values["speaker 19999"] = {**figures, "utterances": 9}
    slices = {"speaker": values, "length": {"short": figures}}
    page = page_of(tmp_path, {"test": {"report_by": slices}})
    assert len(page) < 500_000
    speakers = [f"speaker {n:05}" for n in (0, 198, 19_999)]
    assert all(f"<td>{speaker}<" in page for speaker in speakers)
    assert "speaker 00199" not in page
    assert "The 200 of 20000 values of speaker with most utterances" in page


def test_order_by_use_alternates_the_worst_and_draws() -> None:
    scored = [ScoredUtterance(f"{n:03}", "a b c", " ".join(["x"] * (n % 6))) for n in range(400)]
    ordered = order_by_use(scored)
    errors = [result.counts.errors for result in ordered]
    assert sorted(ordered, key=lambda utterance: utterance.id) == scored
    worst, random = errors[:100:2], errors[1:100:2]
    assert min(worst) == 3 and 3.0 < sum(random) / len(random) < 4.5
    assert order_by_use(scored[::-1]) == ordered


def test_confusions_count_errors_by_kind() -> None:
    pairs = pair_units("hold the line", "told line") + pair_units("hold on", "told on now")
    assert confusions(Counter(pairs)) == {
        "Substituted": [{"reference": "hold", "hypothesis": "told", "count": 2}],
        "Deleted": [{"reference": "the", "hypothesis": "", "count": 1}],
        "Inserted": [{"reference": "", "hypothesis": "now", "count": 1}],
    }


def test_page_shows_any_metrics(tmp_path: Path) -> None:
    test = {"a": {"loss": 2.5, "report_by": {"speaker": {"ann": {"utterances": 2, "loss": 3.25}}}}}
    page = page_of(tmp_path, test, metrics={"loss": Metric(is_fraction=False)})
    assert ">2.5" in page and ">3.25" in page
    interval = {"low": 0.5, "high": 0.9, "unit": "clip", "unit_count": 9}
    figures = {"accuracy": 0.7, "utterances": 10, "accuracy_interval": interval}
    page = page_of(tmp_path, {"test": figures}, metrics={"accuracy": Metric()})  # of a classifier
    assert "70.0 %" in page and "50.0 to 90.0" in page and 'id="table"' not in page
    assert "Nothing was tested." in page_of(tmp_path, {})

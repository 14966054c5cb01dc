"""Two runs are compared on the same references, or not at all."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.compare import MOST, compare, compare_runs, write_comparison
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import report_errors
from tests.runs import read_json

PAIRS = Path(__file__).parent / "data/mapsswe"


def read_pair(name: str, side: str) -> list[ScoredUtterance]:
    with (PAIRS / f"{name}.tsv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    return [ScoredUtterance(row["id"], row["reference"], row[side]) for row in rows]


def write_run(
    folder: Path, sets: Mapping[str, Sequence[ScoredUtterance]], *, figures: str = "summary.json"
) -> Path:
    folder.mkdir()
    test = {name: report_errors(folder, name, scored) for name, scored in sets.items()}
    (folder / figures).write_text(json.dumps({"test": test}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Return a run and a folder of scores, which have two of their test sets in common."""
    names = ("better", "level")
    a = write_run(tmp_path / "a", {name: read_pair(name, "a") for name in (*names, "worse")})
    of_b = {name: read_pair(name, "b")[::-1] for name in names}
    b = write_run(tmp_path / "b", of_b, figures="scores.json")
    return str(a), str(b)


def test_it_prints_whether_they_differ(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbkit(["compare", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"A: {runs[0]} (not compared, because only here: worse)",
        f"B: {runs[1]}",
        "better: 60 utterances, 482 words, 2523 characters; 95 % intervals over 60 clips",
    ]
    assert lines[3] == "  WER A       35.7 % (172 / 482; 31.0 to 40.6, 60 clips)"
    assert lines[5] == "  WER A - B  +15.6 points (10.2 to 21.0, 60 clips)"
    tests = [each for each in lines if "MAPSSWE" in each]
    assert "90 segments, A - B +0.833 errors each, Z 5.404, p < 0.001: B makes fewer" in tests[0]
    assert "Z -2.604, p 0.009: A makes fewer word errors" in tests[1]
    first = lines.index("  changed most, in word errors:") + 1
    assert lines[first : first + 3] == [
        "    u09: 9 in A, 2 in B",
        "      reference  four message you leave it answered call calling will",
        "      A",
    ]


def test_its_json_has_the_same_figures(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbkit(["compare", *runs, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (printed["only_a"], printed["only_b"], [*printed["test"]]) == (
        ["worse"],
        [],
        ["better", "level"],
    )
    better = printed["test"]["better"]
    in_run = read_json(Path(runs[0]) / "summary.json")["test"]["better"]
    assert better["WER"]["a"]["rate"] == in_run["WER"]
    assert better["WER"]["a"]["interval"] == in_run["WER_interval"]
    assert better["CER"]["difference"] == pytest.approx((768 - 462) / 2523)
    assert better["MAPSSWE"]["segments"] == 90
    changes = [abs(each["word_errors_a"] - each["word_errors_b"]) for each in better["changed"]]
    assert changes == sorted(changes, reverse=True)
    assert len(changes) == MOST


def test_both_stand_side_by_side_on_a_page(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "both.html"
    assert sbkit(["compare", *runs, "--html", str(page)]) == 0
    text = " ".join(page.read_text("utf-8").split())
    assert "+15.6 points <small>10.2 to 21.0</small>" in text
    assert "better: 90 segments, A - B +0.833 errors each, Z 5.404" in text
    shown = json.loads(text.split('id="data">')[1].split("</script>")[0])
    better = {row["id"]: row for row in shown["sets"]["better"]}
    assert [*shown["sets"]] == ["better", "level"]
    assert len(better) == 60
    assert [run["errors"] for run in better["u09"]["runs"]] == [9, 2]


def test_without_words_characters_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"a": "今天天气很好", "b": "你好", "c": "我们去吃饭吧"}
    heard = {"a": "今天天汽很好", "b": "你", "c": "我们去吃饭吧"}
    runs = [
        write_run(
            tmp_path / name,
            {"test": [ScoredUtterance(id, texts[id], said[id], by_words=False) for id in texts]},
        )
        for name, said in (("a", heard), ("b", texts))
    ]
    assert sbkit(["compare", *map(str, runs), "--html", str(tmp_path / "both.html")]) == 0
    said = capsys.readouterr().out
    assert "test: 3 utterances, 14 characters; 95 %" in said
    assert "CER A       14.3 % (2 / 14; " in said
    assert "MAPSSWE: no test: segments must differ, but all 2 have the same difference" in said
    assert "changed most, in character errors:" in said
    page = (tmp_path / "both.html").read_text("utf-8")
    assert "WER" not in said + page.partition("<script")[0]


def test_other_references_are_refused() -> None:
    a = [ScoredUtterance("a", "one", "one"), ScoredUtterance("b", "two", "two")]
    says = "1 utterances are only in A, 0 only in B, and 1 have another text, such as b. Score both"
    with pytest.raises(SbkitError, match=f"those of test differ: .*{says}"):
        compare(
            "test", [*a, ScoredUtterance("c", "three", "")], [a[0], ScoredUtterance("b", "too", "")]
        )


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"test": [ScoredUtterance("a", "one", "one")]})
    b = write_run(tmp_path / "b", {"other": [ScoredUtterance("a", "one", "one")]})
    with pytest.raises(SbkitError, match=r"but .*a has test and .*b has other\. Score both"):
        compare_runs(a, b)
    (b / "utterances_test.jsonl").write_bytes((a / "utterances_test.jsonl").read_bytes())
    (b / "summary.json").unlink()
    with pytest.raises(SbkitError, match=r"b must be a run that was tested.*neither summary.json"):
        write_comparison(tmp_path / "both.html", compare_runs(a, b))

"""More than two runs: each against the best, on the same references."""

import json
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.wer import ScoredUtterance
from tests.evaluate.test_compare import read_pair, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Return three runs: one with fewer errors, and two with the same, of which one has more."""
    worse, better = read_pair("better", "a"), read_pair("better", "b")
    other = {"level": read_pair("level", "a")}
    sets = {"a": {"better": worse} | other, "b": {"better": better}, "c": {"better": worse[::-1]}}
    return [str(write_run(tmp_path / name, each)) for name, each in sets.items()]


def test_a_table_has_the_intervals_and_marks_the_best(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbkit(["compare", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "not compared, because not in all: level",
        "better: 60 utterances, 482 words, 2523 characters; 95 % intervals over 60 clips",
    ]
    assert lines[2].split("  ")[-1] == "run"
    assert [line.endswith(run) for line, run in zip(lines[3:], runs, strict=True)] == 3 * [True]
    assert [line.startswith("  *") for line in lines[3:]] == [False, True, False]
    assert " 35.7 (31.0 to 40.6) " in lines[3]
    assert "+15.6 (10.2 to 21.0), p < 0.001  " in lines[3]
    assert sbkit(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["test"]["better"]["rows"]
    assert [row["best"] for row in rows] == [False, True, False]
    assert rows[0]["WER"] == rows[2]["WER"]
    assert rows[0]["WER"]["errors"] == 172


def test_what_cannot_be_ranked_is_one_sentence(runs: list[str], tmp_path: Path) -> None:
    one = [ScoredUtterance("a", "one", "one")]
    other = str(write_run(tmp_path / "other", {"other": one}))
    with pytest.raises(SbkitError, match=r"none is in all \(.*a has better, level; .*has other\)"):
        sbkit(["compare", *runs, other])
    same_name = str(write_run(tmp_path / "same", {"better": one}))
    with pytest.raises(SbkitError, match=rf"differ: .* Here A is {runs[0]}, and B is {same_name}"):
        sbkit(["compare", *runs, same_name])
    with pytest.raises(SbkitError, match="must come with two runs"):
        sbkit(["compare", *runs, "--html", str(tmp_path / "all.html")])

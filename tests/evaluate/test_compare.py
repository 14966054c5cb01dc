"""Runs are compared with the best of them on the same references, or not at all."""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.compare import MAX_CHANGED_UTTERANCES, ComparedRun, compare, compare_runs
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import figures_of_test_set, write_results
from sbkit.lm.language_models import SEEN, describe_seen
from tests.runs import read_json

DATA = Path(__file__).parent / "data"
Captured = pytest.CaptureFixture[str]


def read_pair(name: str, side: str) -> list[ScoredUtterance]:
    with (DATA / f"{name}.tsv").open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        return [ScoredUtterance(row["id"], row["reference"], row[side]) for row in rows]


def write_run(folder: Path, sets: Mapping[str, Sequence[ScoredUtterance]]) -> str:
    folder.mkdir()
    test = {name: figures_of_test_set(scored) for name, scored in sets.items()}
    for name, scored in sets.items():
        write_results(folder, name, scored, test[name])
    plain = {name: figures.plain() for name, figures in test.items()}
    (folder / "summary.json").write_text(json.dumps({"test": plain}))
    return str(folder)


def units(output: str, heading: str) -> dict[str, int]:
    """Return the numbers of words and characters behind a heading; other rates may add units."""
    numbers = output.partition(f"{heading}, ")[2].partition(";")[0].split(", ")
    by_unit = {unit: int(number) for number, unit in map(str.split, numbers)}
    return {unit: by_unit[unit] for unit in ("words", "characters") if unit in by_unit}


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Write a run and a folder of scores, which have two test sets in common."""
    names = ("better", "level")
    sets_of_a = {name: read_pair(name, "a") for name in names} | {"other": read_pair("level", "b")}
    sets_of_b = {name: read_pair(name, "b")[::-1] for name in names}
    b = write_run(tmp_path / "b", sets_of_b)
    return [write_run(tmp_path / "a", sets_of_a), b]


def test_table_and_largest_changes(runs: list[str], capsys: Captured) -> None:
    assert sbkit(["compare", *runs]) == 0
    output = capsys.readouterr().out
    assert "not compared, because not in all runs: other" in output
    assert units(output, "better: 60 utterances") == {"words": 482, "characters": 2523}
    best, worse = output.splitlines()[3:5]
    assert best.startswith("  *") and best.endswith(runs[1]) and worse.endswith(runs[0])
    assert "35.7 (31.0 to 40.6)" in worse and "+15.6 (10.2 to 21.0)" in worse
    changed = output.partition("changed most, in word errors:")[2].split("\n", 4)
    assert changed[1].split() == ["u09:", "9", "in", "A,", "2", "in", "B"]
    assert changed[2].endswith("four message you leave it answered call calling will")


def test_compare_names_differing_settings_and_seen_sentences(
    tmp_path: Path, capsys: Captured
) -> None:
    """Of three runs, one has a key that the others lack."""
    settings = {
        **{"output_folder": "a", "lr": 0.1, "d_model": 144, "amsgrad": False},
        **{"lin.in_features": 144, "CNN.causal": False, "tokenizer.file": "<output_folder>/x"},
    }
    changes = [
        {},
        {"d_model": 96, "lin.in_features": 96, "CNN.causal": True, "amsgrad": True},
        {"lr": 0.2, "text": {"case": "keep"}, "output_folder": "c"},
    ]
    folders = [tmp_path / name for name in "abc"]
    for folder, change in zip(folders, changes, strict=True):
        write_run(folder, {"test": [A, B]})
        summary = read_json(folder / "summary.json")
        seen = {"seen": 1, "of": 2}
        summary["test"]["test"][SEEN] = seen if change else None
        summary["test"]["test"]["decoder"] = "beam" if change else "greedy"
        summary["values"] = settings | change
        (folder / "summary.json").write_text(json.dumps(summary))
    assert sbkit(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    seen_line = describe_seen(seen)
    assert [line for line in lines if "seen" in line] == [f"  {x}: {seen_line}" for x in "BC"]
    assert lines[lines.index("settings that differ:") + 1 :] == [
        "  lr: 0.1 in A and B, 0.2 in C",
        "  d_model: 144 in A and C, 96 in B",
        "  amsgrad: false in A and C, true in B",
        "  decoder: greedy in A, beam in B and C",
        '  text: null in A and B, {"case": "keep"} in C',
        "  CNN.causal: false in A and C, true in B",
    ]


def test_leaderboard_sorts_by_words_then_characters_with_parameters_and_minutes(
    tmp_path: Path, capsys: Captured
) -> None:
    """Runs of other machines count; of two equal WERs the better CER has the star."""
    runs = []
    for name, text in (("ann", "two four"), ("ben", "one four"), ("eve", "one too")):
        scored = [ScoredUtterance("a", "one two", text)]
        runs.append(write_run(tmp_path / name, {"test": scored}))
        summary = read_json(tmp_path / name / "summary.json")
        summary |= {"parameters": 1_640_000, "train_seconds": 90} if name != "ann" else {}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    assert sbkit(["compare", *runs]) == 0
    lines = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1][-3:] == ["M parameters", "minutes", "run"]
    assert [Path(line[-1]).name for line in lines[2:5]] == ["eve", "ben", "ann"]
    assert [line[0] == "*" for line in lines[2:5]] == [True, False, False]
    assert lines[2][-4:-2] == ["1.6", "1.5"]


def test_compare_marks_all_best_runs(runs: list[str], tmp_path: Path, capsys: Captured) -> None:
    copies = [
        write_run(tmp_path / name, {"better": read_pair("better", side)[::-1]})
        for name, side in (("c", "b"), ("d", "a"))
    ]
    assert sbkit(["compare", *runs, *copies, "--json"]) == 0
    test = json.loads(capsys.readouterr().out)["test"]["better"]
    assert [row["is_best"] for row in test["rows"]] == [False, True, True, False]
    assert ["above_best" in row for row in test["rows"]] == [True, False, True, True]
    assert test["rows"][0]["WER"] == test["rows"][3]["WER"]
    assert test["changed"] == []


def test_json_has_the_figures_of_runs(runs: list[str], capsys: Captured) -> None:
    assert sbkit(["compare", *runs, "--json"]) == 0
    comparison: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (comparison["not_in_all"], [*comparison["test"]]) == (["other"], ["better", "level"])
    better = comparison["test"]["better"]
    worse_run, _ = better["rows"]
    in_run = read_json(Path(runs[0]) / "summary.json")["test"]["better"]
    assert worse_run["WER"]["rate"] == in_run["WER"]
    assert worse_run["WER"]["errors"] == 172
    assert worse_run["WER"]["interval"] == in_run["WER_interval"]
    difference = worse_run["above_best"]["CER"]["difference"]
    assert difference == pytest.approx((768 - 462) / 2523)
    changes = [abs(a - b) for a, b in (change["errors"] for change in better["changed"])]
    assert changes == sorted(changes, reverse=True)
    assert len(changes) == MAX_CHANGED_UTTERANCES


def test_compare_counts_characters_in_a_language_without_spaces(
    tmp_path: Path, capsys: Captured
) -> None:
    texts = {"a": "今天天气很好", "b": "你好", "c": "我们去吃饭吧"}
    recognized = {"a": "今天天汽很好", "b": "你", "c": "我们去吃饭吧"}
    runs = []
    for name, hypotheses in (("a", recognized), ("b", texts)):
        rows = [ScoredUtterance(id, texts[id], hypotheses[id], by_words=False) for id in texts]
        runs.append(write_run(tmp_path / name, {"test": rows}))
    assert sbkit(["compare", *runs]) == 0
    output = capsys.readouterr().out
    assert units(output, "test: 3 utterances") == {"characters": 14}
    assert " 14.3 (" in output
    assert "changed most, in character errors:" in output
    assert "WER" not in output


def test_rate_without_a_reference_is_none(tmp_path: Path, capsys: Captured) -> None:
    silent = [ScoredUtterance("a", "", text) for text in ("", "oh")]
    runs = [write_run(tmp_path / f"run{len(u.hypothesis)}", {"test": [u]}) for u in silent]
    assert sbkit(["compare", *runs]) == 0
    output = capsys.readouterr().out
    unknown = [*filter(math.isnan, silent[0].errors.rates(by_words=True).values())]
    assert output.count("none (no interval") == 3 * len(unknown) and "nan" not in output


A, B = ScoredUtterance("a", "one", "one"), ScoredUtterance("b", "two", "two")
A_RIGHT = ScoredUtterance("a", "hi ann", "hi ann")


@pytest.mark.parametrize("others", [[A, ScoredUtterance("b", "too", "")], [A, B, B]])
def test_compare_refuses_other_references(others: list[ScoredUtterance]) -> None:
    with pytest.raises(SbkitError, match="references of test in y and x differ, for example in b"):
        compare("test", [ComparedRun("x", [A, B]), ComparedRun("y", others)])


def test_case_and_marks_are_normalized(tmp_path: Path, capsys: Captured) -> None:
    """A user trains with case and punctuation, and asks what that costs."""
    plain = [ScoredUtterance("a", "hi ann", "hi and"), ScoredUtterance("b", "one two", "one")]
    kept = [
        replace(plain[0], reference="Hi, Ann.", hypothesis="hi Ann", normalized=A_RIGHT),
        replace(plain[1], reference="One two!", hypothesis="One", normalized=plain[1]),
    ]
    runs = [
        write_run(tmp_path / name, {"test": scored})
        for name, scored in (("plain", plain), ("kept", kept), ("also kept", kept))
    ]
    assert sbkit(["compare", *runs[:2]]) == 0
    output = capsys.readouterr().out
    assert units(output, "test: 2 normalized utterances") == {"words": 4, "characters": 13}
    lines = output.splitlines()
    assert [line.split("(")[0].split() for line in lines[2:4]] == [["*", "25.0"], ["50.0"]]
    assert sbkit(["compare", *runs[1:]]) == 0  # two that keep the same: as written
    output = capsys.readouterr().out
    assert units(output, "test: 2 utterances") == {"words": 4, "characters": 16}


def test_compare_refuses_runs_without_a_common_test_set(tmp_path: Path) -> None:
    a = Path(write_run(tmp_path / "a", {"test": [A]}))
    b = Path(write_run(tmp_path / "b", {"other": [A]}))
    with pytest.raises(SbkitError, match="test set: .*a has test; .*b has other"):
        compare_runs([a, b])

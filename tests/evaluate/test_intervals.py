"""How the interval of a rate is printed and written."""

import json
from pathlib import Path

import pytest

from sbkit.evaluate.accuracy_report import Answer, accuracy_figures, describe_accuracy
from sbkit.evaluate.interval import Interval
from sbkit.evaluate.intervals import describe_interval, describe_units, interval_figures
from sbkit.evaluate.utterances import hash_references
from sbkit.evaluate.wer import score
from sbkit.evaluate.wer_report import describe_results, report_errors

# Twenty clips of two speakers: Ann's are all right, of Bob's every second word is wrong.
SET = [score(f"ann{n}", "a b", "a b", speaker="ann") for n in range(10)]
SET += [score(f"bob{n}", "a b", "a c", speaker="bob") for n in range(10)]


def test_the_line_of_a_test_set_names_what_was_drawn() -> None:
    words = "WER 25.0 % (10 / 40 words; 0.0 to 50.0, only 2 speakers)"
    assert describe_results(SET).endswith(f", {words}")
    clips = describe_results([score(each.id, each.reference, each.hypothesis) for each in SET])
    assert clips.endswith(", WER 25.0 % (10 / 40 words; 15.0 to 35.0, 20 clips)")
    assert clips.startswith("CER 16.7 % (10 / 60 characters; 10.0 to 23.3, 20 clips), ")
    assert describe_results(SET[:1]).endswith(
        "(0 / 2 words; no interval: there must be at least two to draw from, but there is 1 clip)"
    )


def test_the_summary_has_the_interval_and_what_it_belongs_to(tmp_path: Path) -> None:
    figures = report_errors(tmp_path, "test", SET)
    assert figures["WER_interval"] == {"low": 0.0, "high": 0.5, "unit": "speaker", "unit_count": 2}
    assert figures["CER_interval"]["high"] == pytest.approx(1 / 3)
    assert figures["references"] == hash_references(SET)
    assert figures["word_errors"] == {"substitutions": 10, "deletions": 0, "insertions": 0}
    assert report_errors(tmp_path, "test", SET[::-1]) == figures
    assert (tmp_path / "wer_test.txt").read_text().startswith("WER 25.00 % (10 errors / 40 words")
    assert len((tmp_path / "utterances_test.jsonl").read_text().splitlines()) == 20
    json.dumps(figures, allow_nan=False)


def test_without_an_interval_there_is_a_reason() -> None:
    none = Interval(low=None, high=None, unit="clip", unit_count=1, reason="there is one")
    assert describe_interval(none) == "no interval: there is one"
    assert interval_figures(none) == {
        "low": None,
        "high": None,
        "unit": "clip",
        "unit_count": 1,
        "reason": "there is one",
    }


def test_few_units_are_called_few() -> None:
    assert describe_units("speaker or clip", 12) == "12 speakers or clips"
    assert describe_units("speaker", 9) == "only 9 speakers"


def test_an_accuracy_has_its_interval() -> None:
    answers = [Answer(str(n), "a", "ab"[n % 4 == 0], speaker=str(n % 20)) for n in range(40)]
    assert describe_accuracy(answers) == "accuracy 75.0 % (30 / 40; 55.0 to 95.0, 20 speakers)"
    figures = accuracy_figures(answers)
    assert (figures["accuracy"], figures["right"], figures["utterances"]) == (0.75, 30, 40)
    assert figures["accuracy_interval"]["unit_count"] == 20
    assert accuracy_figures([])["accuracy_interval"]["low"] is None

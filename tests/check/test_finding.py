"""What a finding looks like in print, and what `sbkit check` leaves with."""

from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.check.check import check_planned_run
from sbkit.check.finding import Finding, summary, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.commands.check import exit_code

ERROR = Finding(check="labels", declared="a must be", effect="is not", where="x.yaml:3", fix="Do.")
NOTE = Finding(check="data", declared="b", effect="c", where="x.yaml:4", fix="E.", stops=False)


def test_the_severity_is_in_the_text_and_in_the_record() -> None:
    assert str(ERROR) == "x.yaml:3: error: a must be, but is not [labels]\n  fix: Do."
    assert str(NOTE).startswith("x.yaml:4: note: b, but c [data]")
    assert [each.as_record()["severity"] for each in (ERROR, NOTE)] == ["error", "note"]


@pytest.mark.parametrize(
    ("findings", "said", "code", "strict"),
    [
        ([], "Nothing found.", 0, 0),
        ([NOTE], "1 note", 0, 1),
        ([ERROR, NOTE, ERROR], "2 errors and 1 note", 1, 1),
    ],
)
def test_only_what_stops_a_run_is_an_exit_code(
    findings: list[Finding], said: str, code: int, strict: int
) -> None:
    assert summary(findings) == said
    assert exit_code(findings, strict=False) == code
    assert exit_code(findings, strict=True) == strict


def test_control_characters_are_printed_escaped() -> None:
    named = replace(ERROR, declared="data_folder must be")
    assert named.as_sentence().startswith("data_folder must be, but is not. Do.")
    assert ERROR.as_sentence().startswith("A must be")
    shown = str(Finding(check="x", declared="\x1b[31m", effect="", where="y:1", fix="z"))
    assert "\x1b" not in shown


def test_a_sentence_without_its_halves_stays_whole() -> None:
    finding = Finding(check="x", where="y:1", **words_of("Something went wrong."))
    assert finding.as_sentence() == "Something went wrong. Correct it there."


def test_a_part_that_fails_is_reported_unless_a_check_names_its_key(tmp_path: Path) -> None:
    yaml = tmp_path / "it.yaml"
    yaml.write_text("lr: 1\nCNN: 1\noutput_folder: there\n")

    def check_it(planned: PlannedRun) -> list[Finding]:
        return [found]

    with PlannedRun(yaml, {}) as planned:
        planned.faults["loaders"] = SbkitError("`CNN` must stride evenly, but does not. Correct.")
        found = planned.finding("x", "CNN", declared="a", effect="b", fix="C.", stops=False)
        beside_note = [each.check for each in check_planned_run(planned, [check_it])]
        found = replace(found, stops=True)
        beside_error = [each.check for each in check_planned_run(planned, [check_it])]
    assert beside_note == ["x", "loaders", "recipe"]
    assert beside_error == ["x", "recipe"]


def test_a_check_that_fails_is_a_note(tmp_path: Path) -> None:
    yaml = tmp_path / "it.yaml"
    yaml.write_text("output_folder: there\n")

    def check_it(planned: PlannedRun) -> list[Finding]:
        raise TypeError("an unexpected keyword")

    with PlannedRun(yaml, {}) as planned:
        note, *_ = check_planned_run(planned, [check_it])
    assert not note.stops
    assert "(TypeError: an unexpected keyword)" in note.effect

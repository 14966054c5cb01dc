"""What a finding looks like in print, and what `sbkit check` leaves with."""

from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.text import printable
from sbkit.check.check import check_planned_run, from_error
from sbkit.check.command import exit_code
from sbkit.check.finding import Finding, summary, words_of
from sbkit.check.planned_run import PlannedRun

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
        ([NOTE, NOTE], "2 notes", 0, 1),
        ([ERROR], "1 error", 1, 1),
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
    assert printable("a\x1b[2J\r\u202eb\tñ 你\n") == "a\\x1b[2J\\r\\u202eb\\tñ 你\\n"
    named = replace(ERROR, declared="data_folder must be")
    assert named.as_sentence().startswith("data_folder must be, but is not. Do.")
    assert ERROR.as_sentence().startswith("A must be")
    shown = str(Finding(check="x", declared="\x1b[31m", effect="", where="y:1", fix="z"))
    assert "\x1b" not in shown


def test_a_sentence_without_its_halves_stays_whole() -> None:
    finding = Finding(check="x", where="y:1", **words_of("Something went wrong."))
    assert finding.as_sentence() == "Something went wrong. Correct it there."


def test_a_note_of_the_same_line_hides_no_error(tmp_path: Path) -> None:
    yaml = tmp_path / "it.yaml"
    yaml.write_text("CNN: 1\nlr: 0.1\n")
    with PlannedRun(yaml, {}) as planned:
        fault = SbkitError("`CNN` must stride evenly, but does not. Correct it.")
        planned.faults["loaders"] = fault
        note = planned.finding("x", "CNN", declared="a", effect="b", fix="C.", stops=False)
        stopping = planned.finding("x", "CNN", declared="a", effect="b", fix="C.")
        told = from_error(fault, "loaders", planned)
        assert check_planned_run(planned, [check_that_yields(note)]) == [told, note]
        assert check_planned_run(planned, [check_that_yields(stopping)]) == [stopping]


def test_one_python_error_is_one_finding(tmp_path: Path) -> None:
    yaml = tmp_path / "it.yaml"
    yaml.write_text("CNN: 1\n")

    def check_a(planned: PlannedRun) -> list[Finding]:
        raise TypeError("forward() got an unexpected keyword argument 'lengths'")

    def check_b(planned: PlannedRun) -> list[Finding]:
        return check_a(planned)

    with PlannedRun(yaml, {}) as planned:
        (finding,) = check_planned_run(planned, [check_a, check_b])
    assert "unexpected keyword argument 'lengths'" in finding.effect


def check_that_yields(finding: Finding):  # type: ignore[no-untyped-def]
    def check_it(planned: PlannedRun) -> list[Finding]:
        return [finding]

    return check_it

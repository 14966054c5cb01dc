"""What a finding looks like in print, how findings are gathered, and what a dry run leaves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module

from sbkit.base.errors import ConfigError
from sbkit.check.check import check_planned_run, summary
from sbkit.check.dry_run import dry_run
from sbkit.check.planned_run import Finding, PlannedRun
from sbkit.commands.check import exit_code
from tests.check.harness import planned_run
from tests.runs import Workplace

ERROR = Finding(check="labels", problem="`a` has 3", where="x.yaml:3", fix="Do.")
NOTE = Finding(check="data", problem="a clip is silent", where="x.yaml:1", stops=False)


def test_finding_has_its_severity_in_text_and_record() -> None:
    assert str(ERROR) == "x.yaml:3: error: `a` has 3 [labels]\n  fix: Do."
    assert str(NOTE) == "x.yaml:1: note: a clip is silent [data]"
    assert [finding.as_record()["severity"] for finding in (ERROR, NOTE)] == ["error", "note"]


def test_finding_as_sentence_names_its_place_unless_that_is_the_file() -> None:
    assert ERROR.as_sentence() == "`a` has 3. Do. (x.yaml:3)"
    assert NOTE.as_sentence() == "a clip is silent."


def test_finding_escapes_control_characters() -> None:
    finding = replace(ERROR, problem="\x1b[31m")
    assert "\x1b" not in f"{finding} {finding.as_sentence()}"


@pytest.mark.parametrize(
    ("findings", "text", "code", "strict_code"),
    [
        ([], "Nothing found.", 0, 0),
        ([NOTE], "1 note", 0, 1),
        ([ERROR, NOTE, ERROR], "2 errors and 1 note", 1, 1),
    ],
)
def test_only_errors_set_the_exit_code_unless_strict(
    findings: list[Finding], text: str, code: int, strict_code: int
) -> None:
    assert summary(findings) == text
    assert exit_code(findings, strict=False) == code
    assert exit_code(findings, strict=True) == strict_code


@pytest.fixture
def planned(tmp_path: Path) -> PlannedRun:
    (tmp_path / "a.yaml").write_text("lr: 1\nCNN: 1\noutput_folder: there\n")
    return PlannedRun(tmp_path / "a.yaml", {})


def test_failed_step_is_reported_unless_an_error_has_its_key(planned: PlannedRun) -> None:
    def check_front_end(planned: PlannedRun) -> list[Finding]:
        return [finding]

    with planned:
        planned.faults["loaders"] = ConfigError("`CNN` does not stride evenly. Correct it.")
        finding = planned.finding("CNN", problem="a", stops=False)
        beside_note = [f.check for f in check_planned_run(planned, [check_front_end])]
        finding = replace(finding, stops=True)
        beside_error = [f.check for f in check_planned_run(planned, [check_front_end])]
    assert beside_note == ["front_end", "loaders", "recipe"]
    assert beside_error == ["front_end", "recipe"]


def test_check_that_raises_is_a_note(planned: PlannedRun) -> None:
    def check_nothing(planned: PlannedRun) -> list[Finding]:
        raise TypeError("an unexpected keyword")

    with planned:
        note, *_ = check_planned_run(planned, [check_nothing])
    assert not note.stops
    assert "(TypeError: an unexpected keyword)" in note.problem


def test_dry_run_of_a_healthy_step_trains_everything_once(
    workplace: Workplace, tmp_path: Path
) -> None:
    with planned_run(workplace, tmp_path / "run") as planned:
        assert planned.make_cpu_brain()
        random_state = torch.get_rng_state()
        trace = dry_run(planned)
        assert trace.trained == {id(p) for p in planned.require_model().parameters()}
        assert (trace.error, trace.created, trace.unsaved) == (None, [], [])
        assert dry_run(planned) is trace
        assert torch.equal(torch.get_rng_state(), random_state)
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks

"""What a finding looks like in print, how findings are gathered, and what a dry run leaves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sbkit.check.planned_run import Finding, PlannedRun
from torch import nn
from torch.nn.modules import module

from recipes.asr.recipe import Asr
from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.check import check, settings
from sbkit.check.check import check_planned_run, summary
from sbkit.check.dry_run import dry_run
from sbkit.check.ownership import reachable
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
def planned(tmp_path: Path) -> Iterator[PlannedRun]:
    (tmp_path / "a.yaml").write_text("lr: 1\nCNN: 1\noutput_folder: there\n")
    with PlannedRun(tmp_path / "a.yaml", {}) as planned:
        yield planned


def test_failed_step_is_reported_unless_an_error_has_its_key(planned: PlannedRun) -> None:
    def check_front_end(planned: PlannedRun) -> list[Finding]:
        return [finding]

    planned.faults["loaders"] = ConfigError("`CNN` does not stride evenly. Correct it.")
    finding = planned.finding("CNN", problem="a", stops=False)
    beside_note = [f.check for f in check_planned_run(planned, [check_front_end])]
    finding = replace(finding, stops=True)
    beside_error = [f.check for f in check_planned_run(planned, [check_front_end])]
    assert beside_note == ["front_end", "loaders", "recipe"]
    assert beside_error == ["front_end", "recipe"]


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (DataError("a.csv: no text; name a `manifest`", where="a.csv:3"), "a.csv:3"),
        (DataError("5 of 9 rows of train are unusable"), "override of manifest"),
        (ConfigError("`lr` is odd"), "/a.yaml:1"),
    ],
)
def test_error_stands_at_its_table_or_at_the_option_that_names_the_data(
    error: SbkitError, place: str, tmp_path: Path
) -> None:
    keys = ["lr: 1", "manifest: null", "data_folder: null", "output_folder: run"]
    (tmp_path / "a.yaml").write_text("\n".join(keys))
    overrides = {"manifest": {"train": "a.csv"}}
    with PlannedRun(tmp_path / "a.yaml", overrides) as planned:
        planned.faults["splits"] = error
        findings = check_planned_run(planned, [])
    assert [f.where for f in findings if f.check == "splits"][0].endswith(place)


def test_check_that_raises_is_a_note(planned: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_ranges(planned: PlannedRun) -> list[Finding]:
        raise TypeError("an unexpected keyword")

    monkeypatch.setattr(settings, "check_ranges", check_ranges)
    note, *_ = check_planned_run(planned, [check_ranges])
    assert not note.stops
    assert "(TypeError: an unexpected keyword)" in note.problem


def test_check_walks_past_a_module_without_super_init(workplace: Workplace, tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            self.names = ["a"]

    with planned_run(workplace, tmp_path / "run") as planned:
        planned.results["hparams"] = planned.build_hparams() | {"bare": Bare()}
        assert ("bare", "names") in [path for path, _ in reachable(planned)]


def test_finding_is_kept_at_each_place_and_as_an_error(planned: PlannedRun) -> None:
    error = planned.finding("lr", problem="a")
    elsewhere = planned.finding("CNN", problem="a")
    findings = [error, replace(error, stops=False), elsewhere, replace(error, problem="b")]

    def check_front_end(planned: PlannedRun) -> list[Finding]:
        return findings

    def places(findings: list[Finding]) -> list[tuple[str, str, bool]]:
        return [(f.problem, f.where, f.stops) for f in findings if f.check == "front_end"]

    expected = places([replace(f, check="front_end") for f in (error, *findings[2:])])
    assert places(check_planned_run(planned, [check_front_end])) == expected
    findings[:2] = findings[1::-1]  # the note comes first
    assert places(check_planned_run(planned, [check_front_end])) == expected


@pytest.mark.parametrize("num_errors", [1, 2])
def test_training_shows_notes_beside_errors(
    planned: PlannedRun,
    num_errors: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    findings = [*[ERROR, replace(ERROR, problem="`b`")][:num_errors], NOTE]
    monkeypatch.setattr(check, "check_planned_run", lambda planned: findings)
    monkeypatch.setattr(PlannedRun, "load_recipe", lambda run: Asr())
    with pytest.raises(ConfigError, match="`a` has 3" if num_errors == 1 else "found 2 errors"):
        check.check_before_training(planned)
    assert caplog.messages == ["note: a clip is silent."]


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

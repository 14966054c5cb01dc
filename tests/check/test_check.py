"""What a finding looks like in print, how findings are gathered, and what a dry run leaves."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from matplotlib.figure import Figure
from speechbrain import Stage
from torch import nn
from torch.nn.modules import module

from docs.reference import CHECK_FIELDS, compare_fields
from recipes.asr.brain import AsrBrain
from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.check import check
from sbkit.check.check import CheckResult, check_run
from sbkit.check.checked_run import Finding, RunSpec, finding_at
from sbkit.commands.cli import run
from sbkit.logs.progress import shows_progress
from sbkit.train import setup
from sbkit.train.ownership import reachable
from sbkit.train.setup import RunData, declare_run, prepare_data
from tests.calls import note_calls
from tests.check.harness import brain, checked_run, declared_run
from tests.runs import ROOT, Workplace

ERROR = Finding(check="labels", problem="`a` has 3", where="x.yaml:3", fix="Do.")
NOTE = Finding(check="data", problem="a clip is silent", where="x.yaml:1", stops=False)


def test_finding_as_line_and_as_sentence() -> None:
    assert str(ERROR) == "x.yaml:3: error: `a` has 3 [labels]\n  fix: Do."
    assert str(NOTE) == "x.yaml:1: note: a clip is silent [data]"
    assert ERROR.as_sentence() == "`a` has 3. Do. (x.yaml:3)"
    assert NOTE.as_sentence() == "a clip is silent."
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
    findings: list[Finding],
    text: str,
    code: int,
    strict_code: int,
    declared: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "check_run", lambda *_, **__: CheckResult(findings=findings))
    command = ["check", str(declared.yaml_file)]
    assert run(command) == code
    assert capsys.readouterr().out.splitlines()[-1] == text
    assert run([*command, "--strict", "--json"]) == strict_code
    records = json.loads(capsys.readouterr().out)["findings"]
    assert [record["severity"] for record in records] == [f.severity for f in findings]
    unknown, missing = compare_fields(CHECK_FIELDS, [{"findings": record} for record in records])
    assert not unknown and (not records or all(name.startswith("cost") for name in missing))


@pytest.fixture
def declared(tmp_path: Path) -> RunSpec:
    (tmp_path / "a.yaml").write_text("lr: 1\nCNN: 1\noutput_folder: there\ncheck: True\n")
    return declare_run(tmp_path / "a.yaml", {})


def checking(monkeypatch: pytest.MonkeyPatch, result: object) -> None:
    """Let the checks of values be one that returns or raises a result."""

    def check_front_end(declared: RunSpec) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(check, "CHECKS_OF_VALUES", [check_front_end])


def test_fault_is_reported_unless_an_error_has_its_key(
    declared: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("`CNN` does not stride evenly. Correct it.", keys=("CNN",))

    monkeypatch.setattr(setup, "load_recipe", refuse)
    for stops, names in ((False, ["front_end", "run"]), (True, ["front_end"])):
        checking(monkeypatch, [finding_at(declared, "CNN", problem="a", stops=stops)])
        assert [finding.check for finding in check_run(declared).findings] == names


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (DataError("a.csv: no text; name a `manifest`", file="a.csv", line=3), "a.csv:3"),
        (DataError("5 of 9 rows of train are unusable"), "override of manifest"),
        (ConfigError("`lr` is odd", keys=("lr",)), "/a.yaml:1"),
    ],
)
def test_error_stands_at_its_table_or_at_the_option_that_names_the_data(
    error: SbkitError, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["lr: 1", "manifest: null", "data_folder: null", "output_folder: run"]
    (tmp_path / "a.yaml").write_text("\n".join(keys))
    declared = declare_run(tmp_path / "a.yaml", {"manifest": {"train": "a.csv"}})
    checking(monkeypatch, error)
    assert check_run(declared).findings[0].where.endswith(place)


def test_failing_check_is_a_note(declared: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    checking(monkeypatch, TypeError("an unexpected keyword"))
    note, *_ = check_run(declared).findings
    assert not note.stops
    assert "(TypeError: an unexpected keyword, in line " in note.problem  # of this file


def test_progress_of_a_check_is_hidden(declared: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    check_progress = Mock(__name__="check_progress")
    check_progress.side_effect = lambda _: shown.append(shows_progress.get())
    monkeypatch.setattr(check, "CHECKS_OF_VALUES", [check_progress])
    check_run(declared)
    assert shown == [False]


def test_check_walks_past_a_module_without_super_init() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            self.names = ["a"]

    assert ("bare", "names") in [path for path, _ in reachable({"bare": Bare()})]


def test_finding_is_kept_at_each_place_and_as_an_error(
    declared: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = finding_at(declared, "lr", problem="a")
    elsewhere = finding_at(declared, "CNN", problem="a")
    findings = [error, replace(error, stops=False), elsewhere, replace(error, problem="b")]
    findings.append(replace(error, fix="later"))
    checking(monkeypatch, findings)

    def kept() -> list[Finding]:
        return [f for f in check_run(declared).findings if f.check == "front_end"]

    expected = [replace(f, check="front_end") for f in (error, *findings[2:4])]
    assert kept() == expected
    findings[:2] = findings[1::-1]  # the note comes first
    assert kept() == expected


@pytest.mark.parametrize("num_errors", [1, 2])
def test_training_shows_notes_beside_errors(
    declared: RunSpec,
    num_errors: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    findings = [*[ERROR, replace(ERROR, problem="`b`")][:num_errors], NOTE]
    result = CheckResult(findings=findings)
    monkeypatch.setattr(check, "check_run", lambda *_, **__: result)
    with pytest.raises(ConfigError, match="`a` has 3" if num_errors == 1 else "found 2 errors"):
        check.check_before_training(cast(RunData, SimpleNamespace(spec=declared)))
    assert caplog.messages == ["note: a clip is silent."]


def test_own_object_finds_the_labels_and_writes_only_in_the_folder_of_the_check(
    workplace: Workplace, tmp_path: Path
) -> None:
    """Objects of the run itself are built once the check has passed."""
    yaml = tmp_path / "own.yaml"
    own = "!new:tests.check.parts.Opening\n    folder: !ref <output_folder>"
    yaml.write_text(f"base: {ROOT}/hparams/ctc.yaml\nopening: {own}\n")
    with declared_run(workplace, tmp_path / "run", yaml=yaml) as declared:
        assert check_run(declared, checks=[]).findings == []
    assert not (tmp_path / "run").exists()


class Reporting(AsrBrain):
    """Logs, draws and writes in its hooks, as a user's Brain may."""

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        super().on_stage_start(stage, epoch)
        logging.getLogger(__name__).warning("a hook")
        Path(self.hparams.output_folder, "hook.txt").touch()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        super().on_stage_end(stage, stage_loss, epoch)
        logging.getLogger(__name__).warning("a hook")
        self.log("hook", 1.0)
        self.log_figure("hook", Figure())


@pytest.mark.slow
def test_nothing_that_hooks_log_or_write_in_the_check_reaches_the_run(
    workplace: Workplace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SBKIT_SAVED_FILE", str(tmp_path / "saved"))
    caplog.set_level(logging.INFO)
    with declared_run(workplace, tmp_path / "run", recipe=brain(Reporting)) as declared:
        data = prepare_data(declared)
        caplog.clear()
        check.check_before_training(data)
    assert "a hook" not in caplog.messages
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_check_calls_the_hooks_of_a_run_in_its_order(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, None] = {}  # the first of each hook and stage, in their order
    hooks = "on_fit_start init_optimizers on_stage_start fit_batch on_fit_batch_start on_stage_end"
    methods = "compute_forward compute_objectives optimizers_step evaluate_batch"
    for hook in f"{hooks} {methods}".split():

        def note(brain: AsrBrain, *arguments: object, hook: str = hook) -> None:
            calls[f"{hook} {arguments[0] if hook.startswith('on_stage') else ''}"] = None

        note_calls(monkeypatch, AsrBrain, hook, note)
    with declared_run(workplace, tmp_path / "run") as declared:
        assert check_run(declared, checks=[]).findings == []
    in_check = [*calls]
    calls.clear()
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1") == 0
    assert [*calls][: len(in_check)] == in_check
    assert in_check[-2:] == ["evaluate_batch ", "on_stage_end Stage.VALID"]


def test_dry_run_of_a_healthy_step_trains_everything(workplace: Workplace, tmp_path: Path) -> None:
    with checked_run(workplace, tmp_path / "run") as healthy:
        dry_run = healthy.dry_run
        assert dry_run.trained == {id(p) for p in healthy.model.parameters()}
        assert (dry_run.error, dry_run.created, dry_run.unsaved) == (None, [], [])
        random_state = torch.get_rng_state()
        assert check_run(healthy.spec, data=healthy.data, checks=[]).findings == []
        assert torch.equal(torch.get_rng_state(), random_state)
    assert not (tmp_path / "run").exists()
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


@pytest.mark.slow
@pytest.mark.ddp
def test_first_of_two_ranks_checks_while_the_other_waits(
    workplace: Workplace, tmp_path: Path
) -> None:
    options = ("--number_of_epochs=1", "--check=True")
    process = workplace.train_forked(tmp_path / "run", *options, ranks=2)
    assert process.returncode == 0, process.stderr

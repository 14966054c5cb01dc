"""A run folder belongs to one declaration, compared with how the run began."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.declaration import (
    FILE,
    RESOLVED,
    Declaration,
    read_declaration,
    refuse_edited,
)
from sbkit.config.hparams import resolved_text
from sbkit.train.finished import is_finished, may_write_results
from sbkit.train.main import tune_run
from sbkit.train.run import Run
from tests.runs import ROOT

YAML = """
seed: 1
output_folder: results/x
data_folder: null
language: en
number_of_epochs: 4
lr: 0.1
hidden: 3
compile: False
profile: False
CNN: !new:torch.nn.Linear
    in_features: 2
    out_features: !ref <hidden>
head: !new:torch.nn.Linear [!ref <hidden>, 1]
model: !new:torch.nn.ModuleList
    - [!ref <CNN>, !ref <head>]
opt_class: !name:torch.optim.SGD
    lr: !ref <lr>
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>
"""
DATA = {"train": "a" * 64, "test": "b" * 64}


def parts(hidden: int = 3) -> dict[str, Any]:
    cnn, head = nn.Linear(2, hidden), nn.Linear(hidden, 1)
    return {"CNN": cnn, "head": head, "model": nn.ModuleList([cnn, head])}


def declare(
    folder: Path,
    text: str = YAML,
    *,
    data: Mapping[str, str] | None = DATA,
    hparams: dict[str, Any] | None = None,
    **overrides: object,
) -> Declaration:
    yaml, tokenizer = folder / "run.yaml", folder / "tokenizer.model"
    yaml.write_text(text)
    if not tokenizer.exists():
        tokenizer.write_bytes(b"abc")
    return Declaration.of(
        yaml, overrides, data=data, tokenizer_file=tokenizer, hparams=hparams or parts()
    )


def begun(folder: Path, epoch: int = 1, **meta: Any) -> Path:
    """Begin a run and save one checkpoint of it."""
    run = folder / "run"
    checkpointer = Checkpointer(run / "checkpoints", recoverables={"model": parts()["model"]})
    checkpointer.declaration = declare(folder).begin(run)
    checkpointer.save_checkpoint(meta={"epoch": epoch, **meta})
    return run


def test_what_may_change_is_taken_and_said(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert declare(tmp_path).refuse_other(run) is None
    moved = {"output_folder": "elsewhere", "data_folder": "/other/place"}
    assert declare(tmp_path, **moved).refuse_other(run) is None
    said = declare(tmp_path, number_of_epochs=9, lr=0.5).refuse_other(run)
    assert said is not None
    assert "number_of_epochs: 4 when it began, 9 now; lr: 0.1 when it began, 0.5 now" in said
    said = declare(tmp_path, compile=True, profile=True).refuse_other(run)
    assert said is not None
    assert said.endswith(
        "compile: false when it began, true now; profile: false when it began, true now."
    )


@pytest.mark.parametrize(
    "value", ["2026-11-22", "!!set {b, a}", "!!binary aGk=", "{2026-11-22: 1}"]
)
def test_what_json_has_not_is_written_out(tmp_path: Path, value: str) -> None:
    declared = declare(tmp_path, f"{YAML}when: {value}\n")
    declared.begin(tmp_path / "run")
    written = json.loads((tmp_path / "run" / FILE).read_text())["values"]
    assert written == declared.values
    assert declare(tmp_path, f"{YAML}when: 2026-11-23\n").values["when"] != written["when"]


def test_a_yaml_that_was_edited_by_hand_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path)
    changed = {"data_folder": "/other/place", "number_of_epochs": 9}  # as a run may go on
    (run / RESOLVED).write_text(resolved_text(tmp_path / "run.yaml", changed))
    before = read_declaration(run)
    assert before is not None
    refuse_edited(run, before)
    (run / RESOLVED).write_text((run / RESOLVED).read_text().replace("hidden: 3", "hidden: 4"))
    with pytest.raises(SbkitError, match=r"as it began, but 1 thing differs \(hidden: 3 when it"):
        refuse_edited(run, before)
    (run / RESOLVED).write_text("hidden: (a, [1)\n")
    with pytest.raises(SbkitError, match=r"must be what training wrote, but cannot be read"):
        refuse_edited(run, before)


def test_a_task_may_be_without_a_file_of_labels(tmp_path: Path) -> None:
    assert Run(ROOT / "hparams/ctc.yaml", {"output_folder": str(tmp_path)}).label_file is None


def test_a_run_without_the_key_of_checks_is_tuned(tmp_path: Path) -> None:
    run = begun(tmp_path)
    text = "recipe: recipes.asr.recipe.ASR\nn: 1\noutput_folder: /nowhere\n"
    (run / RESOLVED).write_text(text)
    with pytest.raises(SbkitError, match="must be where it was trained .* was trained as /nowhere"):
        tune_run(run, {"n": 2})


def test_a_rank_that_does_not_see_the_folder_of_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = declare(tmp_path)
    first = declared.begin(tmp_path / "shared")
    monkeypatch.setattr("sbkit.checkpoint.declaration.rank", lambda: 1)
    monkeypatch.setattr("sbkit.checkpoint.declaration.SEEN_WITHIN", 0.0)
    assert declared.begin(tmp_path / "shared") == first
    with pytest.raises(SbkitError, match="must be one folder for all processes, but rank 1"):
        declared.begin(tmp_path / "of another node")


def test_a_rank_of_other_data_is_refused_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same = declare(tmp_path), declare(tmp_path, data_folder="/of/this/node")
    short = declare(tmp_path, data={**DATA, "train": "c" * 64})
    ranks = [first, same, short]
    monkeypatch.setattr("sbkit.checkpoint.declaration.gather_over_ranks", lambda _: ranks)
    for each in ranks:
        with pytest.raises(SbkitError, match="`train`: aaaaaaaaaaaa on rank 0, c+ on rank 2"):
            each.refuse_other_ranks()
    ranks.pop()
    first.refuse_other_ranks()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"language": "de"}, "1 thing differs (language: en when it began, de now)"),
        ({"data": {**DATA, "train": "c" * 64}}, "the data of `train`: aaaa"),
        ({"data": {"train": "a" * 64}}, "the data of `test`"),
        ({"data": None, "data_folder": "/other"}, "data_folder: null when it began, /other now"),
        ({"hidden": 5, "hparams": parts(5)}, "1 thing differs (hidden: 3 when it began, 5 now)"),
        ({"hparams": parts(5)}, "CNN.weight: 3x2 when it began, 5x2 now"),
        ({"text": YAML.replace("in_features: 2", "in_features: 7")}, "CNN.in_features: 2 when"),
        ({"text": YAML + "more: 1\n"}, "more: nothing when it began, 1 now"),
        ({"text": YAML.replace("language: en\n", "")}, "language: en when it began, nothing now"),
        (
            {"text": YAML.replace("[!ref <CNN>, !ref <head>]", "[!ref <head>, !ref <CNN>]")},
            "model.0.0: <CNN> when it began, <head> now",
        ),
    ],
)
def test_everything_else_is_refused_with_both_values(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    run = begun(tmp_path)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(SbkitError) as caught:
        declare(tmp_path, **change).refuse_other(run)
    assert said in str(caught.value)
    assert "choose another --output_folder" in str(caught.value)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_change_that_may_be_hides_none_of_the_same_values(tmp_path: Path) -> None:
    text = YAML.replace("in_features: 2", "in_features: 4")
    run = tmp_path / "run"
    checkpointer = Checkpointer(run / "checkpoints", recoverables={"model": nn.Linear(1, 1)})
    checkpointer.declaration = declare(tmp_path, text).begin(run)
    checkpointer.save_checkpoint()
    other = text.replace("in_features: 4", "in_features: 9")
    with pytest.raises(SbkitError, match="CNN.in_features: 4 when it began, 9 now"):
        declare(tmp_path, other, number_of_epochs=9).refuse_other(run)


def test_a_frozen_part_is_named(tmp_path: Path) -> None:
    run, frozen = begun(tmp_path), parts()
    frozen["CNN"].requires_grad_(False)
    with pytest.raises(SbkitError, match="CNN.weight: 3x2 when it began, 3x2, frozen now"):
        declare(tmp_path, hparams=frozen).refuse_other(run)


def test_the_resolved_yaml_declares_the_same_run(tmp_path: Path) -> None:
    run = begun(tmp_path)
    text = resolved_text(tmp_path / "run.yaml", {})
    assert declare(tmp_path, text).refuse_other(run) is None
    with pytest.raises(SbkitError, match="language: en when it began, de now"):
        declare(tmp_path, text, language="de").refuse_other(run)


def test_a_run_that_went_on_for_longer_is_tuned_by_its_own_yaml(tmp_path: Path) -> None:
    """Where references were, that has values: 9 epochs in `number_of_epochs` and in the counter."""
    run, later = begun(tmp_path), {"number_of_epochs": 9}
    (run / RESOLVED).write_text(resolved_text(tmp_path / "run.yaml", later))
    own = Declaration.of(run / RESOLVED, {}, data=DATA, hparams=parts())
    assert "number_of_epochs: 4 when it began, 9 now" in (own.refuse_other(run) or "")
    other = Declaration.of(run / RESOLVED, {"hidden": 9}, data=DATA, hparams=parts())
    with pytest.raises(SbkitError, match="hidden: 3 when it began, 9 now"):
        other.refuse_other(run)


def test_the_comparison_is_with_the_beginning_and_not_with_the_last_call(tmp_path: Path) -> None:
    run = begun(tmp_path)
    other = declare(tmp_path, language="de")
    other.begin(run)  # as a later call might: the file stays what it was
    with pytest.raises(SbkitError, match="language: en when it began"):
        other.refuse_other(run)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("{}")])
def test_a_declaration_of_another_run_is_refused(tmp_path: Path, spoil: Any) -> None:
    run = begun(tmp_path)
    spoil(run / FILE)
    with pytest.raises(SbkitError, match="must be the one that .* was saved with"):
        declare(tmp_path).refuse_other(run)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"values": 3}', '{"strange": {}}', "[" * 9999])
def test_a_malformed_declaration_is_a_sentence(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run"
    Checkpointer(run / "checkpoints", recoverables={"m": nn.Linear(1, 1)}).save_checkpoint()
    (run / FILE).write_text(text)
    with pytest.raises(SbkitError, match="must be what sbkit wrote when the run began"):
        declare(tmp_path).refuse_other(run)


def test_a_run_of_an_older_sbkit_goes_on_with_a_note(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Checkpointer(run / "checkpoints", recoverables={"m": nn.Linear(1, 1)}).save_checkpoint()
    said = declare(tmp_path, language="de").refuse_other(run)
    assert said is not None
    assert "cannot be compared" in said


def test_a_folder_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    declare(tmp_path).begin(run)
    other = declare(tmp_path, language="de")
    assert other.refuse_other(run) is None
    other.begin(run)
    assert json.loads((run / FILE).read_text())["values"]["language"] == "de"


def test_values_keep_no_path_of_the_run_folder(tmp_path: Path) -> None:
    declared = declare(tmp_path, output_folder="/somewhere/else").values
    assert not [value for value in declared.values() if "/somewhere" in str(value)]


@pytest.mark.parametrize(
    ("epoch", "epochs", "finished"), [(4, 4, True), (3, 4, False), (4, 5, False)]
)
def test_results_of_a_finished_run_are_left_alone(
    tmp_path: Path, epoch: int, epochs: int, finished: bool
) -> None:
    assert not is_finished(tmp_path / "run", {}, number_of_epochs=epochs)
    run = begun(tmp_path, epoch=epoch)
    was_finished = is_finished(run, {}, number_of_epochs=epochs)
    assert was_finished is finished
    assert may_write_results(run, was_finished=was_finished)
    (run / "summary.json").write_text("{}")
    assert may_write_results(run, was_finished=was_finished) is not finished

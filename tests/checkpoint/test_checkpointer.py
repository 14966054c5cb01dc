"""Checkpoints are whole or absent, restore everything, and the best are averaged."""

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.checkpoints import KEYS_MAPPING
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrains
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn

from sbkit.base.checksums import find_damage, write_checksums
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import UNFINISHED
from sbkit.checkpoint.ranking import RANKED_BY, AveragedCheckpoints, SavedCheckpoints
from sbkit.checkpoint.weights import RENAMED_BY_SPEECHBRAIN, read_weights
from tests.checkpoint.saves import checkpointer, line, recovered, save
from tests.shortage import largest_file


def test_newest_or_best_checkpoint_is_restored(tmp_path: Path) -> None:
    assert recovered(tmp_path) is None
    save(tmp_path, 0.5, 0.2)
    checkpointer(tmp_path, line(0.3)).save_checkpoint(meta={"CER": math.nan})  # ranks last
    save(tmp_path, 0.4)
    assert recovered(tmp_path) == pytest.approx(0.4)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.2)
    assert recovered(tmp_path, max_key="CER") == pytest.approx(0.5)
    checkpointer(tmp_path, line(0.3)).save_checkpoint(meta={"CER": 0.2})
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.3)  # the newest of the best


def test_recoverable_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="cannot save the recoverable `lr`, a float"):
        Checkpointer(tmp_path, recoverables={"model": nn.Linear(2, 2), "lr": 0.1})


@pytest.mark.parametrize("kill_at", range(5))  # the fifth step does not come
def test_kill_while_replacing_named_checkpoint_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    """The first three steps rename folders, and the fourth removes one."""
    checkpointer(tmp_path, line(1.0)).save_checkpoint(name="last")
    steps: list[str] = []

    def killed_before(step: Callable[..., Any]) -> Callable[..., Any]:
        def take(*arguments: Any) -> Any:
            if len(steps) == kill_at:
                raise KeyboardInterrupt
            steps.append(step.__name__)
            return step(*arguments)

        return take

    second = checkpointer(tmp_path, line(2.0))
    with second.claimed(), monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed_before(Path.rename))
        patch.setattr("sbkit.checkpoint.folder.shutil.rmtree", killed_before(shutil.rmtree))
        with nullcontext() if kill_at == 4 else pytest.raises(KeyboardInterrupt):
            second.save_checkpoint(name="last")
    assert steps == ["rename", "rename", "rename", "rmtree"][:kill_at]
    newest = 1.0 if kill_at < 2 else 2.0
    assert recovered(tmp_path) == newest
    Checkpointer(tmp_path).check_same_model()  # as the next run does
    assert {path.name for path in tmp_path.iterdir()} == {"CKPT+last", ".lock"}
    assert recovered(tmp_path) == newest


def test_best_and_newest_are_kept_even_if_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for value, hours in ((0.1, 0), (0.5, -1), (0.4, -1), (0.3, -24), (0.6, -2)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + 3600 * hours)
        keeper = checkpointer(tmp_path, line(value))
        keeper.save_and_keep_only(meta={"CER": value}, min_keys=["CER"], num_to_keep=1)
        assert recovered(tmp_path) == pytest.approx(value)
    assert sorted(checkpoint.meta["CER"] for checkpoint in keeper.list_checkpoints()) == [0.1, 0.6]


def test_checkpoint_of_a_validation_replaces_those_within_its_epoch(tmp_path: Path) -> None:
    saves = ((INTRA_EPOCH_CKPT_FLAG, [1]), (INTRA_EPOCH_CKPT_FLAG, [1, 2]), ("CER", [3]))
    for value, (key, kept) in enumerate((*saves, (INTRA_EPOCH_CKPT_FLAG, [3, 4])), start=1):
        keeper = checkpointer(tmp_path, line(value))
        keeper.save_checkpoint(meta={key: True, "value": value})
        assert sorted(saved.meta["value"] for saved in keeper.list_checkpoints()) == kept


def test_only_the_next_run_removes_unfinished_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 0.5)
    being_written = tmp_path / f"{UNFINISHED}CKPT+2026-11-20+12-00-00+00"
    being_written.mkdir()
    assert recovered(tmp_path) == 0.5
    assert len(SavedCheckpoints(tmp_path).find_whole(2, min_key="CER")) == 1
    checkpointer(tmp_path, line(0.0)).load_average(2)
    assert being_written.exists()
    checkpointer(tmp_path, line(0.0)).check_same_model()  # as a run does that goes on
    assert not being_written.exists()


@pytest.mark.parametrize("size", [20, 5000])  # not even the meta file, not all of the weights
def test_full_disk_leaves_only_previous_checkpoint(tmp_path: Path, size: int) -> None:
    big = nn.Linear(100, 100)
    before = checkpointer(tmp_path, big).save_checkpoint()
    assert before is not None
    with largest_file(size), pytest.raises(SbkitError, match="Make room") as caught:
        checkpointer(tmp_path, big).save_checkpoint()
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.glob("*CKPT+*")) == [before.path]
    assert find_damage(before.path) is None


def test_checkpoint_is_synced_before_rename_and_its_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, rename = list[str](), Path.rename

    def note_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def note_rename(path: Path, target: Path) -> Path:
        assert {path.name, *(file.name for file in path.iterdir())} <= {*events}
        events.append("renamed")
        return rename(path, target)

    saver = checkpointer(tmp_path, line(1.0))
    with saver.claimed():  # which tries whether folders can be renamed
        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(Path, "rename", note_rename)
        saver.save_checkpoint()
    assert events[-2:] == ["renamed", tmp_path.name]


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    parts = {"model": line(1.0), "epochs": EpochCounter(3)}
    saved = Checkpointer(tmp_path, recoverables=parts).save_checkpoint()
    assert saved is not None
    (saved.path / "epochs.ckpt").write_bytes(b"many")
    write_checksums(saved.path)
    with pytest.raises(SbkitError, match="CKPT.* must hold what training saved") as caught:
        Checkpointer(tmp_path, recoverables=parts).recover_if_possible()
    assert "\n" not in str(caught.value)


def test_module_with_own_saver_is_restored(tmp_path: Path) -> None:
    normalizer = InputNormalization()
    normalizer(torch.randn(2, 5, 4), torch.ones(2))

    def write(module: nn.Linear, path: Path) -> None:
        Path(path).write_text(str(float(module.bias[0].detach())))

    def read(module: nn.Linear, path: Path, end_of_epoch: bool) -> None:
        nn.init.constant_(module.bias, float(Path(path).read_text()))

    def saver(*modules: nn.Module) -> Checkpointer:
        return Checkpointer(
            tmp_path,
            recoverables=dict(zip(("normalizer", "custom", "model"), modules, strict=True)),
            custom_save_hooks={"custom": write},
            custom_load_hooks={"custom": read},
        )

    saver(normalizer, line(2.0), line(1.0)).save_checkpoint()
    modules = InputNormalization(), line(0.0), line(0.0)
    again = saver(*modules)
    again.check_same_model()
    assert again.recover_if_possible() is not None
    again.load_average(2)
    assert torch.equal(modules[0].glob_mean, normalizer.glob_mean)
    assert [float(module.bias[0].detach()) for module in modules[1:]] == [2.0, 1.0]


@pytest.mark.parametrize("kinds", [(Checkpointer, SpeechBrains), (SpeechBrains, Checkpointer)])
def test_speechbrain_reads_our_checkpoints_and_we_read_theirs(
    tmp_path: Path, kinds: tuple[type[SpeechBrains], type[SpeechBrains]]
) -> None:
    writer, reader = kinds
    for value in (0.1, 0.2):
        parts = {"model": line(value), "epochs": EpochCounter(3)}
        next(iter(parts["epochs"]))
        writer(tmp_path, parts).save_and_keep_only(meta={"CER": value}, min_keys=["CER"])
    parts = {"model": line(0.0), "epochs": EpochCounter(3)}
    newest = reader(tmp_path, parts).recover_if_possible()
    assert (newest.meta["CER"], {*newest.paramfiles}) == (0.2, {"epochs", "model"})
    assert (float(parts["model"].bias[0].detach()), parts["epochs"].current) == (
        pytest.approx(0.2),
        1,
    )
    assert reader(tmp_path, parts).find_checkpoint(min_key="CER").meta["CER"] == 0.1


def test_tensors_are_renamed_as_by_speechbrain(tmp_path: Path) -> None:
    assert RENAMED_BY_SPEECHBRAIN == KEYS_MAPPING
    torch.save({"a.mutihead_attn.weight": torch.ones(1)}, tmp_path / "model.ckpt")
    assert [*read_weights(tmp_path / "model.ckpt")] == ["a.multihead_attn.weight"]


KEYS = {"min_key": "CER"}


class ValidatedModel:
    """A checkpointer over one model, whose error is a function of its weight."""

    def __init__(self, folder: Path, error: Callable[[float], float]) -> None:
        self.model = line(-1.0)
        self.checkpointer = checkpointer(folder, self.model)
        self.weights: list[float] = []  # that were validated
        self._error = error

    def compute_error(self) -> float:
        self.weights.append(self.weight)
        return self._error(self.weight)

    @property
    def weight(self) -> float:
        return round(float(self.model.bias[0].detach()), 4)

    def load(self, count: int) -> int:
        averaged = self.checkpointer.load_average(count, self.compute_error, **KEYS)
        assert averaged is not None
        return len(averaged.checkpoints)


@pytest.mark.parametrize(("ranked_by", "best"), [({"min_key": "TER"}, 2), ({"max_key": "TER"}, 3)])
def test_ranking_metric_finds_best(tmp_path: Path, ranked_by: dict[str, str], best: int) -> None:
    for value in (3, 2):
        meta = {"TER": value, RANKED_BY: ranked_by}
        checkpointer(tmp_path, line(0.0)).save_checkpoint(meta=meta)
    (checkpoint,) = SavedCheckpoints(tmp_path).find_averaged()
    assert checkpoint.meta["TER"] == best


@pytest.mark.parametrize(
    ("best_weight", "count", "weight"),
    [
        (0.1, 1, 0.1),  # the best alone: the others only spoil it
        (0.15, 2, 0.15),  # the mean of two
        (0.3, 4, 0.25),  # all of them
    ],
)
def test_averaging_takes_the_count_that_validates_best(
    tmp_path: Path, best_weight: float, count: int, weight: float
) -> None:
    save(tmp_path, 0.4, 0.1, 0.2, 0.3)
    model = ValidatedModel(tmp_path, lambda value: abs(value - best_weight))
    assert (model.load(4), model.weight) == (count, weight)
    assert model.weights == [0.25, 0.15, 0.1]  # means of four, two and one
    # An export or a second test takes the same, and validates nothing.
    averaged = SavedCheckpoints(tmp_path).find_averaged(**KEYS)
    assert [checkpoint.meta["CER"] for checkpoint in averaged] == [0.1, 0.2, 0.3, 0.4][:count]
    again = ValidatedModel(tmp_path, lambda _: math.nan)
    assert (again.load(4), again.weight, again.weights) == (count, weight, [])


def test_averaging_without_errors_takes_only_the_best(tmp_path: Path) -> None:
    save(tmp_path, 0.4, 0.1)
    for _ in range(2):  # the second time it reads the choice
        model = ValidatedModel(tmp_path, lambda _: math.nan)
        assert (model.load(2), model.weight) == (1, 0.1)
    assert str(AveragedCheckpoints.read(tmp_path)) == "tested: the best checkpoint"


def test_averaging_is_chosen_anew_after_more_training(tmp_path: Path) -> None:
    save(tmp_path, 0.4, 0.1)
    assert ValidatedModel(tmp_path, lambda _: 1.0).load(2) == 2  # of equal errors, the mean of most
    save(tmp_path, 0.2)
    (best,) = SavedCheckpoints(tmp_path).find_averaged(**KEYS)
    assert best.meta["CER"] == 0.1
    model = ValidatedModel(tmp_path, lambda value: abs(value - 0.15))
    assert (model.load(2), model.weight) == (2, 0.15)

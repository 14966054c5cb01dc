"""A checkpoint is whole or absent, whatever happens while it is written or afterwards."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sbkit.state.checkpoint import CHECKSUMS, Checkpointer, find_damage, write_checksums
from sbkit.values.errors import SbkitError

KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from torch import nn
from sbkit.state.checkpoint import Checkpointer

def die(part, path):
    Path(path).write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)

model = nn.Linear(3, 2)
Checkpointer(sys.argv[1], recoverables={"model": model}).save_checkpoint(meta={"epoch": 1})
parts = {"model": model, "last": object()}
deadly = Checkpointer(sys.argv[1], recoverables=parts, custom_save_hooks={"last": die})
deadly.save_checkpoint(meta={"epoch": 2})
"""


def line(value: float, rows: int = 2) -> nn.Linear:
    """Make a layer whose every weight is ``value``."""
    layer = nn.Linear(3, rows)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


def checkpointer(folder: Path, model: nn.Module) -> Checkpointer:
    return Checkpointer(folder, recoverables={"model": model})


def save(folder: Path, *values: float) -> list[Path]:
    """Save models of constant weights one after the other; CER is the weight."""
    paths = []
    for value in values:
        saved = checkpointer(folder, line(value)).save_checkpoint(meta={"CER": value})
        assert saved is not None
        paths.append(saved.path)
    return paths


def recovered(folder: Path, **keys: Any) -> float | None:
    """Recover, and give the weight that came; None when nothing did."""
    model = line(-1.0)
    if checkpointer(folder, model).recover_if_possible(**keys) is None:
        return None
    return float(model.bias[0].detach())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert recovered(tmp_path) is None
    save(tmp_path, 0.5, 0.2, 0.4)
    assert recovered(tmp_path) == pytest.approx(0.4)
    assert recovered(tmp_path, min_key="CER") == pytest.approx(0.2)
    assert recovered(tmp_path, max_key="CER") == pytest.approx(0.5)


def test_a_saved_checkpoint_is_named_complete_and_checksummed(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1.0)
    assert list(tmp_path.iterdir()) == [path]
    names = {file.name for file in path.iterdir()}
    assert names == {"CKPT.yaml", "model.ckpt", CHECKSUMS}
    assert set(json.loads((path / CHECKSUMS).read_text())) == names - {CHECKSUMS}
    assert find_damage(path) is None


def test_a_checkpoint_with_a_name_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpointer(tmp_path, line(value)).save_checkpoint(name="last")
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+last"]
    assert recovered(tmp_path) == 2.0


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    for value in (0.5, 0.2, 0.4, 0.1, 0.3):
        keeper = checkpointer(tmp_path, line(value))
        keeper.save_and_keep_only(meta={"CER": value}, min_keys=["CER"], num_to_keep=1)
    assert sorted(each.meta["CER"] for each in keeper.list_checkpoints()) == [0.1, 0.3]
    assert recovered(tmp_path) == pytest.approx(0.3)


def test_a_kill_while_saving_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "saves")],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((tmp_path / "saves").iterdir())) == 2  # one of them unfinished
    model = nn.Linear(3, 2)
    found = checkpointer(tmp_path / "saves", model).recover_if_possible()
    assert found is not None
    assert found.meta["epoch"] == 1
    assert list((tmp_path / "saves").iterdir()) == [found.path]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [20, 5000])  # not even the meta file, not all of the weights
def test_a_full_disk_leaves_the_one_before_and_nothing_else(tmp_path: Path, size: int) -> None:
    big = nn.Linear(100, 100)
    before = checkpointer(tmp_path, big).save_checkpoint()
    assert before is not None
    with largest_file(size), pytest.raises(SbkitError, match="make room") as caught:
        checkpointer(tmp_path, big).save_checkpoint()
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [before.path]
    assert find_damage(before.path) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "cut weights": lambda path: cut(path / "model.ckpt"),
    "a flipped bit": lambda path: flip(path / "model.ckpt"),
    "no weights": lambda path: (path / "model.ckpt").unlink(),
    "cut meta": lambda path: cut(path / "CKPT.yaml"),
    "empty meta": lambda path: (path / "CKPT.yaml").write_bytes(b""),
    "meta of bytes": lambda path: (path / "CKPT.yaml").write_bytes(b"\xff\x00{["),
    "cut checksums": lambda path: cut(path / CHECKSUMS),
    "no checksums": lambda path: (path / CHECKSUMS).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, newest = save(tmp_path, 1.0, 2.0)
    DAMAGES[damage](newest)
    assert find_damage(newest) is not None
    assert recovered(tmp_path) == 1.0
    if "meta" not in damage:  # without its date it is the oldest, and never looked at
        assert str(newest) in "".join(capsys.readouterr()).replace("\n", "")


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_all_are_damaged_nothing_starts_over_in_silence(tmp_path: Path, damage: str) -> None:
    for path in save(tmp_path, 1.0, 2.0):
        DAMAGES[damage](path)
    with pytest.raises(SbkitError, match="but all 2 are damaged"):
        recovered(tmp_path)


def test_weights_of_another_model_are_named_with_both_sizes(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1.0)
    with pytest.raises(SbkitError, match="2 tensors differ") as caught:
        checkpointer(tmp_path, line(0.0, rows=5)).recover_if_possible()
    said = str(caught.value)
    assert str(path) in said
    assert "weight: 2x3 saved, 5x3 declared" in said
    assert "bias: 2 saved, 5 declared" in said
    with pytest.raises(SbkitError, match="bias: none saved, 2 declared; .* none declared"):
        checkpointer(tmp_path, nn.Sequential(line(0.0))).recover_if_possible()
    with pytest.raises(SbkitError, match="weight: 2x3 saved, 5x3 declared"):
        checkpointer(tmp_path, line(0.0, rows=5)).load_average(1)


def test_another_model_leaves_the_declared_one_untouched(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    model = line(0.0, rows=5)
    with pytest.raises(SbkitError):
        checkpointer(tmp_path, model).recover_if_possible()
    assert not any(parameter.any() for parameter in model.parameters())


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_loading_runs_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "saves", 1.0)
    torch.save(Payload(tmp_path / "ran"), path / "model.ckpt")
    write_checksums(path)
    with pytest.raises(pickle.UnpicklingError):
        recovered(tmp_path / "saves")
    assert not (tmp_path / "ran").exists()


def test_the_best_checkpoints_are_averaged(tmp_path: Path) -> None:
    _, damaged, *_ = save(tmp_path, 0.4, 0.1, 0.2, 0.9)
    cut(damaged / "model.ckpt")
    model = line(0.0)
    checkpointer(tmp_path, model).load_average(2, min_key="CER")
    torch.testing.assert_close(model.weight, torch.full((2, 3), 0.3))


def test_whole_numbers_are_not_averaged(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    for count in (3, 8):
        norm.num_batches_tracked.fill_(count)
        checkpointer(tmp_path, norm).save_checkpoint()
    checkpointer(tmp_path, norm).load_average(2)
    assert norm.num_batches_tracked == 8
    assert norm.num_batches_tracked.dtype == torch.int64


def test_without_a_checkpoint_nothing_is_averaged(tmp_path: Path) -> None:
    model = line(3.0)
    checkpointer(tmp_path, model).load_average(2)
    assert model.bias[0] == 3.0

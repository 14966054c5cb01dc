"""Everything comes back from its file, or what stands in the way is said in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.saves import line, recovered, save


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
    with pytest.raises(SbkitError, match="CKPT.* must hold what training saved"):
        recovered(tmp_path / "saves")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"many"])
def test_a_file_of_something_else_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    parts = {"model": line(1.0), "epochs": EpochCounter(3)}
    saved = Checkpointer(tmp_path, recoverables=parts).save_checkpoint()
    assert saved is not None
    (saved.path / "epochs.ckpt").write_bytes(content)
    write_checksums(saved.path)
    with pytest.raises(SbkitError, match="CKPT.* must hold what training saved") as caught:
        Checkpointer(tmp_path, recoverables=parts).recover_if_possible()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_recoverable_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    parts = {"model": line(0.0), "epochs": EpochCounter(3)}
    with pytest.raises(SbkitError, match="missing a load path for epochs"):
        Checkpointer(tmp_path, recoverables=parts).recover_if_possible()
    partly = Checkpointer(tmp_path, recoverables=parts, allow_partial_load=True)
    assert partly.recover_if_possible() is not None


def test_a_module_with_a_saver_of_its_own_comes_back(tmp_path: Path) -> None:
    normalizer, own = InputNormalization(), line(2.0)
    normalizer(torch.randn(2, 5, 4), torch.ones(2))

    def write(module: nn.Linear, path: Path) -> None:
        Path(path).write_text(str(float(module.bias[0].detach())))

    def read(module: nn.Linear, path: Path, end_of_epoch: bool) -> None:
        nn.init.constant_(module.bias, float(Path(path).read_text()))

    def keeper(*modules: nn.Module) -> Checkpointer:
        return Checkpointer(
            tmp_path,
            recoverables=dict(zip(("normalizer", "own", "model"), modules, strict=True)),
            custom_save_hooks={"own": write},
            custom_load_hooks={"own": read},
        )

    keeper(normalizer, own, line(1.0)).save_checkpoint()
    modules = InputNormalization(), line(0.0), line(0.0)
    again = keeper(*modules)
    again.check_same_model()
    assert again.recover_if_possible() is not None
    again.load_average(2)
    assert torch.equal(modules[0].glob_mean, normalizer.glob_mean)
    assert [float(each.bias[0].detach()) for each in modules[1:]] == [2.0, 1.0]

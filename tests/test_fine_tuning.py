"""A run that starts from another one, with a frozen part and a slower one: the real command."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sbkit.base.errors import BAD_INPUT
from sbkit.checkpoint.checkpointer import AveragedCheckpoints
from sbkit.commands.cli import run as sbkit
from tests.runs import Workplace, last_parameters, read_json

pytestmark = pytest.mark.slow

ONE = ("--check=False", "--number_of_epochs=1")


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, "--check=False", "--number_of_epochs=3") == 0
    return run


def test_the_test_averages_what_makes_dev_best_and_export_takes_the_same(
    trained: Path, tmp_path: Path
) -> None:
    averaged = AveragedCheckpoints.read(trained / "checkpoints")
    assert averaged is not None
    assert len(averaged.of) == 3
    best_alone = averaged.scores["1"]
    assert averaged.scores[str(len(averaged.checkpoints))] <= best_alone
    sbkit(["export", str(trained), "--out", str(tmp_path / "bundle")])
    exported = read_json(tmp_path / "bundle" / "config.json")["checkpoints"]
    assert len(exported) == len(averaged.checkpoints)


def test_a_run_starts_from_a_bundle_with_another_head(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, run = tmp_path / "bundle", tmp_path / "run"
    sbkit(["export", str(trained), "--out", str(bundle)])
    capsys.readouterr()
    options = (f"--init_from={bundle}", "--freeze=[CNN]", "--lr_scale={Transformer: 0.1}")
    tokens = ("--token_type=bpe", "--vocab_size=40")
    assert workplace.train_here(run, *ONE, *options, *tokens) == 0
    said = capsys.readouterr().out
    assert " of 40 rows by token: " in said
    assert "tensors are loaded: CNN." in said
    theirs, ours = load_file(bundle / "model.safetensors"), last_parameters(run)
    assert torch.equal(theirs["0.conv1.weight"], ours["0.conv1.weight"])  # frozen
    name = next(each for each in theirs if each.startswith("1.") and each.endswith("weight"))
    assert not torch.equal(theirs[name], ours[name])

    # It goes on without its source, and with its frozen part.
    bundle.rename(tmp_path / "gone")
    again = ("--check=False", "--number_of_epochs=2", *options, *tokens)
    assert workplace.train_here(run, *again) == 0
    assert "over the new number of epochs" in capsys.readouterr().out
    assert torch.equal(theirs["0.conv1.weight"], last_parameters(run)["0.conv1.weight"])
    assert workplace.train_here(run, *again[:2], *tokens, f"--init_from={bundle}") == BAD_INPUT
    error = capsys.readouterr().err
    assert "freeze: [" in error
    assert "before, [] now" in error

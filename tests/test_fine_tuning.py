"""A run starts from another one, with a frozen part and a part with a lower learning rate."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from sbkit.base.errors import BAD_INPUT
from sbkit.commands.cli import run as sbkit
from sbkit.train.model_state import measure_normalization
from tests.runs import Workplace, last_parameters

pytestmark = pytest.mark.slow

MEASURE = "sbkit.train.brain.measure_normalization"
ONE_EPOCH = ("--check=False", "--number_of_epochs=1")


def test_run_starts_from_a_bundle_with_another_head(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, bundle, run = (tmp_path / name for name in ("first", "bundle", "run"))
    with patch(MEASURE, wraps=measure_normalization) as measure:
        assert workplace.train_here(first, *ONE_EPOCH) == 0
    measure.assert_called_once()
    sbkit(["export", str(first), "--out", str(bundle)])
    capsys.readouterr()
    options = (f"--init_from={bundle}", "--freeze=[CNN]", "--lr_scale={Transformer: 0.1}")
    tokens = ("--token_type=bpe", "--vocab_size=40")
    with patch(MEASURE) as measure:
        assert workplace.train_here(run, *ONE_EPOCH, *options, *tokens) == 0
    measure.assert_not_called()  # the statistics are those of the bundle
    output = capsys.readouterr().out
    assert " of 40 rows by label: " in output
    assert "loaded: CNN." in output
    theirs, ours = load_file(bundle / "model.safetensors"), last_parameters(run)
    assert torch.equal(theirs["0.conv1.weight"], ours["0.conv1.weight"])  # frozen
    name = next(key for key in theirs if key.startswith("1.") and key.endswith("weight"))
    assert not torch.equal(theirs[name], ours[name])

    assert workplace.train_here(tmp_path / "x", *ONE_EPOCH, *options, "--level=none") == BAD_INPUT
    assert "`compute_features` is {" in capsys.readouterr().err

    # The run resumes without the bundle, and with its frozen part.
    bundle.rename(tmp_path / "gone")
    more_epochs = ("--check=False", "--number_of_epochs=2", *options, *tokens)
    with patch(MEASURE) as measure:
        assert workplace.train_here(run, *more_epochs) == 0
    measure.assert_not_called()
    assert "number_of_epochs: 1" in capsys.readouterr().out
    assert torch.equal(theirs["0.conv1.weight"], last_parameters(run)["0.conv1.weight"])
    without_freeze = (*more_epochs[:2], *tokens, f"--init_from={bundle}")
    assert workplace.train_here(run, *without_freeze) == BAD_INPUT
    error = capsys.readouterr().err
    assert "freeze: [" in error
    assert "before, [] now" in error

"""The first of the two README commands, on the default corpus with a small model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, TINY

IN_OWN_ENVIRONMENT = Path(sys.prefix) == ROOT / ".venv"


@pytest.mark.slow
@pytest.mark.skipif(not IN_OWN_ENVIRONMENT, reason="tools/demo would make .venv: run tools/test")
def test_the_demo_trains_scores_exports_and_transcribes(tmp_path: Path) -> None:
    options = [option for option in TINY if "batch_seconds" not in option]
    command = [ROOT / "tools/demo", f"--output_folder={tmp_path / 'run'}", *options]
    for words in ("epoch 1/1", "run folder:"):  # the second time nothing is trained again
        done = subprocess.run(
            [*command, "--number_of_epochs=1"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert words in done.stdout
        assert "test WER" in done.stdout
        assert "held-out clip:" in done.stdout
        assert f"{tmp_path}/run/bundle/model.safetensors" in done.stdout
    assert "epoch 1/1" not in done.stdout

"""The example docs/examples/overfit.py: does a model learn eight clips?"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import processes
from tests.runs import TINY, TINY_VOICE, Workplace

LARGER = ("--d_model=96", "--d_ffn=192", "--cnn_channels=96", "--num_decoder_layers=0")
LARGER += ("--ctc_weight=1.0", "--dropout=0.0")


def overfit(workplace: Workplace, run: Path, *options: str, yaml: str, tiny: Sequence[str]) -> str:
    arguments = workplace.arguments(run, *options, yaml=yaml, tiny=tiny)
    command = ["docs/examples/overfit.py", *arguments]
    process = processes.run(command, SBKIT_CACHE=workplace.cache)
    assert process.returncode == 0, process.stderr
    assert not run.exists()
    return process.stdout


@pytest.mark.slow
def test_clips_are_learned_or_not(workplace: Workplace, tmp_path: Path) -> None:
    options = (*LARGER, "--number_of_epochs=12")
    printed = overfit(workplace, tmp_path / "run", *options, yaml="hparams/ctc.yaml", tiny=TINY)
    assert "The loss falls in 12 epochs: " in printed
    (cer,) = re.findall(r"CER of the clips: ([\d.]+)%", printed)
    assert float(cer) < 20
    options = ("--lr=0.0", "--number_of_epochs=2")
    printed = overfit(
        workplace, tmp_path / "run", *options, yaml="hparams/tts.yaml", tiny=TINY_VOICE
    )
    assert re.fullmatch(r"The loss does not fall in 2 epochs: .+\n", printed)

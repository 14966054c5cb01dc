"""sbkit and SpeechBrain train side by side, on one corpus, with models of one size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, Workplace, make_workplace

SMALL = ("--d_model=16", "--nhead=2", "--d_ffn=256", "--cnn_channels=64", "--token_type=char")
SMALL += ("--vocab_size=null", "--num_encoder_layers=1", "--num_decoder_layers=1")


@pytest.mark.slow
def test_both_sides_train_in_turns(asterisk_english: Path, tmp_path: Path) -> None:
    workplace: Workplace = make_workplace(asterisk_english, tmp_path)
    command = [sys.executable, "-m", "tools.bench_train", "--rounds=2", "--seconds=0.5"]
    done = subprocess.run(
        [*command, "--to-cer=9", f"--data_folder={workplace.release}", *SMALL],
        cwd=ROOT,
        env={**os.environ, "SBKIT_CACHE": str(workplace.cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) parameters", done.stdout)]
    assert len(sizes) == 3
    assert max(sizes) / min(sizes) < 1.01
    for side in ("sbkit", "speechbrain active", "speechbrain passive"):
        assert len(re.findall(rf"round \d {side}: \d+ RTFx", done.stdout)) == 2
    assert re.search(r"sbkit to the better one of SpeechBrain's: \d+\.\d\d", done.stdout)
    assert re.search(r"to dev CER 9.0: \d+\.\d times as fast", done.stdout)

"""A complete run on a corpus of another sample rate."""

from pathlib import Path

import pytest
import soundfile

from tests.runs import Workplace, read_json, rows_of


@pytest.mark.slow
def test_run_at_8_khz_uses_all_audio(workplace: Workplace, tmp_path: Path) -> None:
    options = ("--sample_rate=8000", "--number_of_epochs=1", "--check=false")
    assert workplace.train_here(tmp_path, *options) == 0
    seconds = read_json(tmp_path / "summary.json")["audio_seconds"]
    rows = rows_of(workplace.release / "train.tsv")
    clips = [workplace.release / "clips" / row["path"] for row in rows]
    assert seconds == pytest.approx(sum(soundfile.info(clip).duration for clip in clips), abs=0.1)

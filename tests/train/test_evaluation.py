"""A run shows the progress of every phase, and the time that training has left."""

import re
from pathlib import Path

import pytest

from sbkit.logs import progress
from tests.runs import Workplace


@pytest.mark.slow
def test_run_shows_progress_of_every_phase(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("LINE_SECONDS", "REFRESH_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)  # at every step
    fresh, more = Workplace(workplace.release, tmp_path / "cache"), ("--check=True",)
    epochs = "--number_of_epochs=2"
    assert fresh.train_here(tmp_path / "run", epochs, "--average_checkpoints=2", *more) == 0
    out = capsys.readouterr().out
    ends = [line.partition(": 100 % done, about 0:00:00 left") for line in out.splitlines()]
    assert list(dict.fromkeys(title for title, end, _ in ends if end)) == [
        *("Decoding train", "Decoding dev", "Decoding test", "checking the run"),
        *("measuring features", "validating", "averaging checkpoints"),
        *("encoding the validation sets", "fitting the confidence of words", "scoring test"),
        "writing clips",
    ]
    steps = [line for line in out.splitlines() if " lr " in line]
    first, *others = (line for line in steps if line.startswith("epoch 1/2"))
    assert not first.endswith("left")
    assert all(re.search(r" > \d:\d\d:\d\d left$", line) for line in others)
    others = [line for line in out.splitlines() if line.startswith("epoch 2/2")]
    assert all(re.search(r"% \d:\d\d:\d\d left$|RTFx \d:\d\d:\d\d left$", line) for line in others)

"""The comparison of ways to use little speech."""

import sys
from pathlib import Path

import pytest

from recipes.asr.little_speech import compare
from sbkit.config.hparams import read_knobs
from tests.runs import TINY, Workplace


def test_study_leaves_out_the_corpus_in_both_spellings(tmp_path: Path) -> None:
    """Otherwise a `--manifest train=FILE` would add its labels to those of the study."""
    corpus = ["--manifest", "train=a.csv", "--manifest=dev=b.csv", "--data_folder", "/data"]
    overrides = ["--lr=0.001", *corpus, "--language", "es"]
    compare.LittleSpeechStudy(tmp_path, overrides, minutes=1, voice_epochs=1)
    knobs = read_knobs(tmp_path / "ctc.yaml", {})
    values = [knobs[key] for key in ("lr", "manifest", "data_folder", "language")]
    assert values == [0.001, None, None, "es"]


@pytest.mark.slow(60)
def test_comparison_trains_each_row_and_goes_on_from_finished_ones(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = ("plain", "text")
    options = ["--minutes=0.2", "--seeds", "1", "--rows", *rows]
    data = [f"--data_folder={workplace.release}", "--language=en", "--word_lm_order=2"]
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    command = ["compare", f"--out={tmp_path}", *options, *TINY, *data]
    monkeypatch.setattr(sys, "argv", command)
    compare.main()
    first = capfd.readouterr().out
    assert [line.split(" | ")[0] for line in first.splitlines()[-4:]] == [
        f"| {row}" for row in rows for _ in ("beam", "greedy")
    ]
    assert first.count("$ python train.py") == 2
    labeled, full = (len((tmp_path / f"{name}.csv").read_text()) for name in ("labeled", "full"))
    assert labeled < full
    compare.main()
    second = capfd.readouterr().out
    assert (second.count("$ python"), second.splitlines()[-4:]) == (0, first.splitlines()[-4:])

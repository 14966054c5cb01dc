"""The example of pseudo-labels: its rows are confident utterances, and training takes them."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from docs.examples import pseudo_labels
from sbkit.decoding.word_times import Confidence
from sbkit.runtime.model_thread import ModelThread
from sbkit.tasks.asr.predict import Transcriber
from tests.runtime.tones import RATE, UnsureModel, silence, speak, tone_bundle
from tests.stores import read_split

TALK = ("lazy", "a dog", "the quick brown fox")
SURE_IF_CLEAR = Confidence(-7.0, 10.0, 0.0, 0.0)  # 0.01 for a posterior of 0.6, and 0.99 for 0.8


def test_rows_are_confident_utterances_that_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, tokenizer, model = tone_bundle(tmp_path, model_class=UnsureModel)
    bundle = replace(bundle, config=replace(bundle.config, confidence={"greedy": SURE_IF_CLEAR}))
    parts = [speak(tokenizer, text) for text in TALK]
    unclear = speak(tokenizer, "a", offset=50.0)
    parts[1][: len(unclear)] = unclear
    samples = [parts[0], silence(2), parts[1], silence(3), parts[2]]
    ends = np.cumsum([len(part) for part in samples]) / RATE
    spoken = [(0.0, ends[0]), (ends[1], ends[2]), (ends[3], ends[4])]
    (tmp_path / "talks").mkdir()
    soundfile.write(tmp_path / "talks/long.wav", np.concatenate(samples), RATE)
    (tmp_path / "talks.csv").write_text("path\ntalks/long.wav\ntalks/gone.wav\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Transcriber,
        "load",
        lambda _: Transcriber(bundle=replace(bundle, model=ModelThread(lambda: model))),
    )
    for threshold, kept in (("0.9", (0, 2)), ("0", (0, 1, 2))):
        pseudo_labels.main("my-model", "talks.csv", "pseudo.csv", threshold)
        assert "talks/gone.wav does not exist" in capsys.readouterr().err
        with Path("pseudo.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["text"] for row in rows] == [TALK[index] for index in kept]
        for row, (start, end) in zip(rows, (spoken[index] for index in kept), strict=True):
            assert row["path"] == str(tmp_path.resolve() / "talks/long.wav")
            offset = float(row["offset"])
            assert max(0, start - 0.6) <= offset <= start
            # The last frame of a tone is silent.
            assert end - 0.1 <= offset + float(row["duration"]) <= end + 0.6
    assert float(rows[1]["confidence"]) == pytest.approx(0.5, abs=0.01)
    manifest = read_split({"manifest": {"train": "pseudo.csv"}}, "train")
    assert manifest.excluded == ()
    assert len({*manifest.ids}) == 3
    assert all(span.end is not None for span in manifest.spans)

"""`tools.bench_live` counts delays and revised words, and prints a table."""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sbkit.base.errors import SbkitError
from sbkit.tasks.asr.session import Endpoint, Final, Partial
from sbkit.text.recognized_word import Word
from tests.runtime.bundles import make_live_run
from tools import bench_live


def test_bench_live_counts_delays_and_revised_words() -> None:
    words = Word("a", 0.0, 0.3), Word("fox", 0.4, 0.9)
    final = Final(seconds=2.0, text="a fox", start=0.0, end=2.0, words=words)
    results = bench_live.LiveResults()
    texts = ("an", 0), ("a fo", 1), ("a dog", 1), ("a fox", 0)
    events = [
        Partial(seconds=0.5 * number, text=text, stable=stable)
        for number, (text, stable) in enumerate(texts, 1)
    ]
    bench_live.add_utterances(results, [*events, final])
    assert results.latencies == pytest.approx([1.0 - 0.3, 2.0 - 0.9])
    assert (results.revised, results.stable_revised) == (3, 0)  # an, fo, dog
    bench_live.add_endpoint(results, [Endpoint(seconds=2.1, rule="silence"), final])
    assert results.endpoints == pytest.approx([1.2])
    pairs = [("a fox", "a fox"), ("a fox", "the fox"), ("a fox", "a fo"), ("", ""), ("a", "")]
    results.are_ends_wrong = [bench_live.has_wrong_end(*pair) for pair in pairs]
    assert results.figures()["last word wrong"] == "2 of 5"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    with (tmp_path / "test.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "sentence"])
        for number in range(2):
            audio = random.normal(0, 0.1, 20_000 + 9_000 * number)
            soundfile.write(tmp_path / f"{number}.wav", audio, 16_000)
            rows.writerow([f"{number}.wav", "a fox"])
    return tmp_path / "test.csv"


def test_bench_live_prints_a_table(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_live_run(table.parent / "run")
    monkeypatch.setattr(sys, "argv", ["bench_live", str(run), str(table), "--chunks=320,1280"])
    recognizer, steps = bench_live.StreamingRecognizer, list[int]()

    def open_recognizer(*, bundle: Any) -> bench_live.StreamingRecognizer:
        steps.append(bundle.model.chunks.step)
        return recognizer(bundle=bundle)

    monkeypatch.setattr(bench_live, "StreamingRecognizer", open_recognizer)
    bench_live.main()
    assert steps == [320 * 16, 1280 * 16]  # each had those of the YAML
    _, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    names = ("320 ms", "1280 ms", "whole clip")
    assert [row[0] for row in rows] == [f"{name}, greedy" for name in names]
    assert len({len(row) for row in rows}) == 1


def test_bench_live_refuses_a_model_of_whole_clips(
    table: Path, plain_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_live", str(plain_bundle), str(table)])
    with pytest.raises(SbkitError, match="only takes whole clips"):
        bench_live.main()

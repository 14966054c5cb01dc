"""The example docs/examples/nano.py: it trains and transcribes as train.py does."""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from docs.examples import nano
from tests import processes

NUM_STEPS, NUM_TEXTS = 20, 10
# With a slow warm-up, three epochs are enough for the first letters.
PEAK_RATE, WARMUP_FRACTION, NUM_EPOCHS = 0.0015, 1.0, 3
COMMAND = (
    *str(re.findall(r"`python (train.py [^`]*--[^`]*)`", str(nano.__doc__))[0]).split(),
    *("--average_checkpoints=1", "--word_lm_order=0", "--token_lm_order=0"),
    *("--check=False", "--log_every=1"),
    f"--lr={PEAK_RATE}",
    f"--warmup_fraction={WARMUP_FRACTION}",
    f"--number_of_epochs={NUM_EPOCHS}",
)


@pytest.fixture
def two_thread_counts() -> Iterator[tuple[int, int]]:
    num_threads = torch.get_num_threads()
    yield 1, 2
    torch.set_num_threads(num_threads)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]


@pytest.mark.slow
def test_losses_and_texts_are_those_of_train_py(
    asterisk_english: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_thread_counts: tuple[int, int],
) -> None:
    process = processes.run([*COMMAND, f"--output_folder={tmp_path}"])
    assert process.returncode == 0, process.stderr
    steps = [row for row in read_json_lines(tmp_path / "train_log.jsonl") if row["kind"] == "step"]
    losses = [row["loss"] for row in steps[:NUM_STEPS]]

    monkeypatch.setattr(nano, "PEAK_RATE", PEAK_RATE)
    monkeypatch.setattr(nano, "WARMUP_FRACTION", WARMUP_FRACTION)
    clips = [c for c in nano.read_clips("train") if len(c.audio) <= 32 * nano.SAMPLE_RATE]
    characters = nano.rank_characters(clip.text for clip in clips)
    for num_threads in two_thread_counts:
        torch.set_num_threads(num_threads)
        model = nano.make_model(nano.NUM_SPECIAL + len(characters), dropout=0.0)
        nano_losses = [*islice(nano.fit(model, clips, characters, NUM_EPOCHS), NUM_STEPS)]
        differences = abs(np.divide(nano_losses, losses) - 1)
        print(f"{num_threads} threads: the losses differ by up to {differences.max():.1e}")
        assert differences.max() < 1e-4

    weights = load_file(tmp_path / "bundle/model.safetensors")
    weights.pop("0.normalize.frames")
    model.load_state_dict({k.replace("0.normalize.", "0."): v for k, v in weights.items()})
    rows = read_json_lines(tmp_path / "utterances_test.jsonl")
    texts = {row["reference"]: row["greedy"] for row in rows}
    test_clips = [*nano.read_clips("test")][-NUM_TEXTS:]
    nano_texts = [nano.transcribe(model, clip, characters) for clip in test_clips]
    assert nano_texts == [texts[clip.text] for clip in test_clips]
    assert nano_texts.count("") < NUM_TEXTS / 2


def test_the_command_trains_and_prints_the_word_errors(
    asterisk_english: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_clips = nano.read_clips
    num_words = sum(len(clip.text.split()) for clip in islice(read_clips("test"), 3))
    monkeypatch.setattr(nano, "read_clips", lambda split: islice(read_clips(split), 3))
    monkeypatch.setattr(nano, "fit", partial(nano.fit, num_epochs=1))
    nano.main()
    *losses, errors = capsys.readouterr().out.splitlines()
    assert losses and all(line.startswith("step ") for line in losses)
    assert re.fullmatch(rf"WER [\d.]+% \(\d+ errors in {num_words} words\)", errors)


def test_errors_are_counted() -> None:
    assert nano.count_errors("abcd", "axcde") == 2
    assert nano.count_errors("", "a") == 1

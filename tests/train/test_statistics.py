"""The mean and deviation of features are kept for later runs, by all that they are made from."""

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import soundfile
import torch

from sbkit.data.batch import Batch, Loader, collate_audio, make_loader
from sbkit.data.sampler import EvalSampler
from sbkit.data.splits import sample_counts
from sbkit.train import model_state
from sbkit.train.model_state import inputs_of_statistics
from tests import processes
from tests.runs import Workplace, losses_of
from tests.stores import Utterance, make_store

CPU = torch.device("cpu")
TAKEN = "The mean and deviation of the features are those of an earlier run."
USER_PART = """import torch
from torch import nn
class Levels(nn.Module):
    floor = 1.0
    def forward(self, audio, lengths):
        if len(audio) == 1000:
            return "a batch that is not tried", lengths
        frames = audio.unfold(1, 400, 400) * (1 + torch.rand(1))
        return frames.abs().mean(2, keepdim=True).clamp(min=self.floor), lengths // 400
"""
TWO_CACHES = """
import os, sys
os.environ["SBKIT_CACHE"] += f"/{os.environ['RANK']}"
from sbkit.base.process import run_main
import train
run_main(train.main)
"""


@pytest.mark.slow(30)
def test_a_later_run_measures_only_what_is_new(workplace: Workplace, tmp_path: Path) -> None:
    own = Workplace(shutil.copytree(workplace.release, tmp_path / "release"), tmp_path / "cache")
    clip = next((own.release / "clips").iterdir())

    def train(name: str, *options: str) -> tuple[int, list[float]]:
        """Return how often features were measured, and the losses."""
        once = ("--number_of_epochs=1", "--num_encoder_layers=1", *options)
        with patch.object(model_state, "_sum_features", wraps=model_state._sum_features) as measure:
            assert own.train_here(tmp_path / name, *once) == 0
        return measure.call_count, losses_of(tmp_path / name)

    first, losses = train("first")
    assert (first, train("again")) == (1, (0, losses))
    assert train("other_model", "--d_model=16")[0] == 0
    assert train("other_features", "--n_mels=40")[0] == 1
    audio, rate = soundfile.read(clip)
    soundfile.write(clip, audio[::-1], rate)
    assert [train("recorded_again")[0], train("once_more")[0]] == [1, 0]


@pytest.mark.slow(30)
@pytest.mark.ddp
def test_ranks_agree_whether_to_measure_even_without_a_common_cache(
    workplace: Workplace, tmp_path: Path
) -> None:
    runs = [tmp_path / "first", tmp_path / "later"]
    for run, times_taken in zip(runs, (0, 1), strict=True):
        command = ["-c", TWO_CACHES, *workplace.arguments(run, "--number_of_epochs=1")]
        process = processes.run(command, ranks=2, SBKIT_CACHE=tmp_path / "caches")
        assert (process.returncode, process.stdout.count(TAKEN)) == (0, times_taken), process
    assert losses_of(runs[0]) == losses_of(runs[1])
    facts = tmp_path.glob("caches/*/corpora/*/facts/statistics-*")
    assert [path.relative_to(tmp_path).parts[1] for path in facts] == ["0"]


def loader_of(clips: datasets.Dataset, batch_seconds: float = 10.0) -> Loader:
    return make_loader(
        clips,
        sampler=EvalSampler(samples=sample_counts(clips), batch_seconds=batch_seconds),
        collate=lambda rows: Batch(**collate_audio(rows, 16_000)),
        num_workers=0,
        pin_memory=False,
    )


def test_settings_code_and_random_numbers_of_features_are_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    audio = np.random.default_rng(0).integers(-99, 99, 4000).astype("<i2").tobytes()
    clips = make_store(Utterance(id, "a", "a", "", 4000, audio) for id in "bcd")
    inputs = []
    for source, floor, seed, batch_seconds in (
        (USER_PART, 1.0, 1, 10.0),
        (USER_PART, 1.0, 1, 10.0),
        (USER_PART, 0.5, 1, 10.0),  # which only silence is below
        (USER_PART, 1.0, 2, 10.0),
        (USER_PART, 1.0, 1, 0.2),
        (USER_PART.replace("is not tried", "nobody tries"), 1.0, 1, 10.0),
    ):
        (tmp_path / "my_levels.py").write_text(source)
        sys.modules.pop("my_levels", None)
        importlib.invalidate_caches()
        part: Any = importlib.import_module("my_levels").Levels()
        part.floor = floor
        torch.manual_seed(seed)
        loader = loader_of(clips, batch_seconds)
        inputs.append(inputs_of_statistics(loader, part, __name__, CPU))
    assert [inputs.count(one) for one in inputs] == [2, 2, 1, 1, 1, 1]

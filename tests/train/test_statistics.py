"""The mean and deviation of features are kept for later runs, by all that they are made from."""

import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor, nn

from sbkit.data.batch import Batch, Loader, UtteranceDataset, collate_audio, make_loader
from sbkit.data.sampler import EvalSampler
from sbkit.data.splits import sample_counts
from sbkit.train import model_state
from sbkit.train.model_state import inputs_of_statistics
from tests import processes
from tests.data.test_splits import make_clips, prepare
from tests.runs import Workplace, losses_of
from tests.stores import Utterance, make_store

CPU = torch.device("cpu")
TAKEN = "The mean and deviation of the features are those of an earlier run."
USER_PART = """from torch import nn
class Levels(nn.Module):
    floor = 1.0
    def forward(self, audio, lengths):
        if len(audio) == 1000:
            return "a batch that is not tried", lengths
        frames = audio.unfold(1, 400, 400)
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
    outputs = [
        processes.run(
            ["-c", TWO_CACHES, *workplace.arguments(run, "--number_of_epochs=1")],
            ranks=2,
            SBKIT_CACHE=tmp_path / "caches",
        )
        for run in runs
    ]
    assert [(output.returncode, output.stdout.count(TAKEN)) for output in outputs] == [
        (0, 0),
        (0, 1),
    ], outputs
    assert losses_of(runs[0]) == losses_of(runs[1])
    assert [path.parent.name for path in tmp_path.glob("caches/*/statistics")] == ["0"]


def loader_of(clips: datasets.Dataset, batch_seconds: float = 10.0) -> Loader:
    return make_loader(
        clips,
        sampler=EvalSampler(samples=sample_counts(clips), batch_seconds=batch_seconds),
        collate=lambda rows: Batch(**collate_audio(rows, 16_000)),
        num_workers=0,
        pin_memory=False,
    )


def inputs_of(
    compute: Callable[..., Any], clips: datasets.Dataset, batch_seconds: float = 10.0
) -> dict[str, object] | None:
    return inputs_of_statistics(loader_of(clips, batch_seconds), compute, __name__, CPU)


def noise(seed: int) -> datasets.Dataset:
    audio = np.random.default_rng(seed).integers(-99, 99, 4000).astype("<i2").tobytes()
    return make_store(Utterance(c, "a", "a", "", 4000, audio) for c in "bcd")


def test_each_setting_of_features_and_their_code_is_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_levels.py").write_text(USER_PART)
    part: Any = importlib.import_module("my_levels")
    clips = noise(0)
    inputs = [inputs_of(part.Levels(), clips)]
    assert inputs[0] == inputs_of(part.Levels(), clips)
    quieter = part.Levels()
    quieter.floor = 0.5  # which only silence is below
    inputs.append(inputs_of(quieter, clips))
    inputs.append(inputs_of(part.Levels(), noise(1)))
    inputs.append(inputs_of(part.Levels(), clips, batch_seconds=0.2))
    (tmp_path / "my_levels.py").write_text(USER_PART.replace("is not tried", "nobody tries"))
    monkeypatch.delitem(sys.modules, "my_levels")
    part = importlib.import_module("my_levels")
    inputs.append(inputs_of(part.Levels(), clips))
    assert all(inputs.count(one) == 1 for one in inputs)


def test_features_that_draw_numbers_are_kept_for_the_same_ones_alone() -> None:
    class Dither(nn.Module):
        def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return (audio + torch.rand_like(audio)).unsqueeze(2), lengths

    clips = noise(0)
    torch.manual_seed(1)
    first = inputs_of(Dither(), clips)
    assert first == inputs_of(Dither(), clips)  # the generator is as it was
    torch.manual_seed(2)
    assert first != inputs_of(Dither(), clips)


def test_a_lazy_clip_written_anew_with_the_same_size_is_an_input(tmp_path: Path) -> None:
    clips = [replace(c, columns={"duration_ms": "100"}) for c in make_clips(tmp_path / "clips", 3)]
    rows = UtteranceDataset(prepare(tmp_path, clips, store="lazy").dataset)
    before = rows.identity()
    assert before == rows.identity()
    content = clips[1].path.read_bytes()
    clips[1].path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert before != rows.identity()

"""State of a model beside its weights: averages, buffers, running and feature statistics."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain import Stage
from speechbrain.utils.epoch_loop import EpochCounter
from torch import Tensor, nn
from torch.optim import Adam

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.data.batch import Batch, collate_audio
from sbkit.models.layers import GlobalNorm
from sbkit.train.model_state import BufferSnapshot, MovingAverage, measure_normalization
from tests import processes
from tests.runs import row_of
from tests.train.lines import LineBrain, ScheduleFree, brain_of, line, loader, rows

DECAY = 0.6  # above (1 + n) / (10 + n) until step 12


class Averaging(LineBrain):
    """Note the weights after each step and in each validation."""

    def on_fit_batch_end(self, *_: Any) -> None:
        self.hparams.seen.append(self.modules["model"].weight.detach().clone())

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage is Stage.VALID:
            self.hparams.validated.append(self.modules["model"].weight.detach().clone())
        super().on_stage_end(stage, stage_loss, epoch)


def averaging(folder: Path, *, decay: float = DECAY, optimizer: Any = Adam) -> Averaging:
    model, epochs = line(), EpochCounter(4)
    averaging: Averaging = brain_of(
        Averaging,
        model=model,
        optimizer=optimizer,
        hparams={"ema_decay": decay, "seen": [], "validated": [], "epoch_counter": epochs},
        checkpointer=Checkpointer(folder, recoverables={"model": model, "epochs": epochs}),
    )
    return averaging


def fit(brain: Averaging, *, bad: int | None = None) -> None:
    inputs, targets = rows(12)
    if bad is not None:
        inputs[3 * bad] = torch.nan
    data: Any = torch.utils.data.TensorDataset(inputs, targets)
    options = {"batch_size": 3}  # such a loader saves its position
    brain.fit(brain.hparams.epoch_counter, data, loader(6, 3), train_loader_kwargs=options)


def test_moving_average_is_validated_saved_and_tested(tmp_path: Path) -> None:
    brain = averaging(tmp_path)
    fit(brain, bad=1)
    steps = brain.hparams.seen
    assert torch.equal(steps[0], steps[1]) and not torch.equal(steps[1], steps[2])
    average, after = steps[0].double(), []
    for number, weight in enumerate(steps, start=1):
        decay = 1.0 if number % 4 == 2 else min(DECAY, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * weight
        after.append(average.float())
    torch.testing.assert_close(brain.hparams.validated, after[3::4], atol=1e-6, rtol=0.0)
    best = brain.checkpointer.find_checkpoint(min_key="loss")
    saved = torch.load(best.paramfiles["model"], weights_only=True)["weight"]
    brain.evaluate(loader(6, 3), min_key="loss")
    for weight in (saved, brain.modules["model"].weight):
        assert any(torch.equal(weight, validated) for validated in brain.hparams.validated)


def test_average_of_the_optimizer_is_validated_saved_and_exported(tmp_path: Path) -> None:
    brain = averaging(tmp_path, decay=0.0, optimizer=ScheduleFree)
    fit(brain)
    z, y = brain.optimizer.state[brain.modules["model"].weight]["z"], brain.hparams.seen[-1]
    average = (y - 0.1 * z) / 0.9
    saved = torch.load(brain.checkpointer.find_checkpoint().paramfiles["model"])["weight"]
    for weight in (saved, brain.hparams.validated[-1], brain.modules["model"].weight):
        torch.testing.assert_close(weight, average)
    with pytest.raises(SbkitError, match="`ema_decay` must be 0, because ScheduleFree averages"):
        fit(averaging(tmp_path / "both", optimizer=ScheduleFree))


def test_moving_average_holds_only_learning_parameters(tmp_path: Path) -> None:
    brain = averaging(tmp_path / "frozen")
    brain.modules["model"].bias.requires_grad_(False)
    fit(brain)
    assert [*brain.training_step.moving_average.shadow] == [0]
    plain = averaging(tmp_path / "plain", decay=0.0)
    fit(plain)
    assert torch.equal(plain.hparams.validated[-1], plain.hparams.seen[-1])
    assert "moving_average" not in plain.checkpointer.recoverables


class Replacing(nn.Module):
    """Keep a mean as SpeechBrain's normalization does: a plain tensor, replaced each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_running_mean_without_a_buffer_is_restored_after_a_skipped_step() -> None:
    module = Replacing()
    statistics = BufferSnapshot(module)
    for is_skipped in (True, False, True, False):
        before = module.mean
        statistics.save()
        module(torch.randn(4, 3) / (0 if is_skipped else 1))
        statistics.restore(torch.tensor(is_skipped))
        assert torch.equal(module.mean, before) is is_skipped
        assert module.mean.isfinite().all()


def test_tensor_on_another_device_than_the_step_is_left_alone() -> None:
    """SpeechBrain's STFT keeps its window on the CPU, also on a GPU (here: meta)."""
    module = Replacing()
    snapshot = BufferSnapshot(module)
    snapshot.save()
    snapshot.restore(torch.tensor(True, device="meta"))
    assert not module.mean.any()


def test_weights_are_back_after_a_failed_save() -> None:
    module = nn.Linear(1, 1)
    average = MovingAverage(module, decay=0.5)
    average.update(1, torch.tensor(False))
    with torch.no_grad():
        module.weight.fill_(3.0)
    with pytest.raises(OSError, match="full"), average.swapped_in():
        assert float(module.weight.detach()) != 3.0
        raise OSError("the disk is full")
    assert float(module.weight.detach()) == 3.0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nonfinite_batch_leaves_running_statistics_unchanged(accumulation: int) -> None:
    batches = loader(40, 5)
    batches.dataset.tensors[0][27, 0] = torch.nan
    norm = nn.BatchNorm1d(3)
    brain = brain_of(model=nn.Sequential(norm, line()), grad_accumulation_factor=accumulation)
    brain.fit(range(1), batches)
    assert int(norm.num_batches_tracked) == 8 - accumulation
    assert all(buffer.isfinite().all() for buffer in norm.buffers())


TWO_RANKS = """
import json
import torch
from torch import nn
from sbkit.distributed.ranks import gather_over_ranks, process_group, rank
from sbkit.train.model_state import agree_on_buffers

with process_group(torch.device("cpu")):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    model[0].running_mean.fill_(rank() + 1.0)
    model[1].register_buffer("flags", torch.full((2, 3), bool(rank())).T)
    model[1].register_buffer("empty", torch.zeros(0))
    model[1].register_buffer("count", torch.tensor(rank() + 7))
    agree_on_buffers(model)
    buffers = {name: str(buffer.tolist()) for name, buffer in model.named_buffers()}
    by_rank = gather_over_ranks(buffers)
    if rank() == 0:
        print(json.dumps(by_rank))
"""


@pytest.mark.ddp
def test_agree_on_buffers_averages_norms_and_copies_rank_0() -> None:
    process = processes.run(["-c", TWO_RANKS], ranks=2)
    assert process.returncode == 0, process.stderr
    first, second = json.loads(process.stdout)
    assert first == second
    assert first["0.running_mean"] == "[1.5, 1.5]"
    assert first["1.count"] == "7"
    assert first["1.flags"] == "[[False, False], [False, False], [False, False]]"


CPU = torch.device("cpu")
LENGTHS = [16_000, 399, 9000, 400, 12_345]


def clips() -> list[Tensor]:
    torch.manual_seed(0)
    noise = [torch.randn(count) * 1000 * (n + 1) for n, count in enumerate(LENGTHS)]
    return [clip.to(torch.int16) for clip in noise]


def batch(audio: list[Tensor]) -> Batch:
    return Batch(**collate_audio([row_of("", clip.numpy()) for clip in audio], 16_000))


def batches() -> Iterator[Batch]:
    yield batch(clips()[:2])
    damaged = batch([*clips()[2:], clips()[0]])
    yield replace(damaged, weights=torch.tensor([1, 1, 1, 0]))


def test_measured_features_equal_numpy() -> None:
    norm = GlobalNorm(n_mels=23)
    measure_normalization([norm], Fbank(n_mels=23), batches(), CPU)
    features = [
        Fbank(n_mels=23)(clip.unsqueeze(0), torch.tensor([len(clip)]))[0][0].double().numpy()
        for clip in clips()
        if len(clip) >= 400
    ]
    frames = np.concatenate(features)
    assert norm.frames == len(frames)
    np.testing.assert_allclose(norm.mean, frames.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.std, frames.std(0), rtol=1e-5)


def test_measuring_empty_training_set_is_refused() -> None:
    with pytest.raises(SbkitError, match="no clip of at least 25 ms"):
        measure_normalization([GlobalNorm(n_mels=23)], Fbank(n_mels=23), iter(()), CPU)

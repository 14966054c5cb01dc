"""The random numbers of an utterance do not depend on its batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from sbkit.audio.augment import AddNoise, AddReverb, SpecAugment
from sbkit.audio.draws import draw_for_step, draw_uniform, seeded_draws
from sbkit.models.pretrained.blocks import mask_spans


def test_draws_follow_from_seed_epoch_utterance_and_call() -> None:
    def draw(*ids: str, seed: int = 1, epoch: int = 1) -> Tensor:
        with seeded_draws(ids, seed=seed, epoch=epoch):
            return torch.cat([draw_uniform(len(ids), 2), draw_uniform(len(ids), 2)], 1)

    rows = draw("a", "b", "c")
    assert torch.equal(draw("c", "x", "a")[[2, 0]], rows[[0, 2]])
    other_rows = [draw("a", seed=2)[0], draw("a", epoch=2)[0]]
    assert len({*torch.cat([*rows, *other_rows]).tolist()}) == 4 * 5
    with seeded_draws([str(number) for number in range(1000)]):
        numbers = draw_uniform(1000, 50)
    assert 0 <= float(numbers.min()) < 1e-3 and 1 - 1e-3 < float(numbers.max()) < 1
    assert np.histogram(numbers, 10)[0].tolist() == pytest.approx([5000] * 10, rel=0.05)
    assert np.corrcoef(numbers.T) == pytest.approx(np.eye(50), abs=0.15)


def test_ranks_share_the_draws_of_a_step_and_torch_draws_for_other_rows() -> None:
    shared = []
    for ids in (["a"], ["b", "c"]):  # two ranks
        with seeded_draws(ids, seed=1, epoch=1, step=3):
            shared.append(draw_for_step(4))
            torch.manual_seed(0)
            expected = torch.rand(3, 2)
            torch.manual_seed(0)
            assert torch.equal(draw_uniform(3, 2), expected)
    assert torch.equal(*shared)
    torch.manual_seed(0)
    assert torch.equal(draw_uniform(1, 2), expected[:1])  # no batch is left behind


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder of two noises that also serve as impulse responses."""
    for number in range(2):
        noise = np.random.default_rng(number).normal(0, 0.1, 3000)
        soundfile.write(tmp_path / f"{number}.wav", noise, 16_000)
    return str(tmp_path)


AUGMENTATIONS: dict[str, Callable[[str], Callable[[Tensor, Tensor], Tensor]]] = {
    "SpecAugment": lambda folder: SpecAugment(),
    "AddNoise": lambda folder: lambda x, n: AddNoise(folder=folder, prob=1.0)(x[:, :, 0], n)[0],
    "AddReverb": lambda folder: lambda x, n: AddReverb(folder=folder, prob=1.0)(x[:, :, 0], n)[0],
    "mask_spans": lambda folder: (
        lambda x, n: mask_spans(x, n, frames=(0.5, 10), channels=(0.5, 9), vector=None)
    ),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_of_an_utterance_does_not_depend_on_its_batch(name: str, folder: str) -> None:
    augment = AUGMENTATIONS[name](folder)
    lengths = torch.tensor([500, 200, 400])
    x = 1000 * torch.randn(3, 500, 80)
    x[1, 200:] = x[2, 400:] = 0
    with seeded_draws(["long", "short", "other"], seed=1, epoch=1):
        batch = augment(x, lengths)
    assert not torch.equal(batch, x)
    for row, (id, length) in enumerate(zip(["long", "short"], [500, 200], strict=False)):
        with seeded_draws([id], seed=1, epoch=1):
            single = augment(x[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(batch[row, :length], single[0], rtol=1e-5, atol=1e-2)

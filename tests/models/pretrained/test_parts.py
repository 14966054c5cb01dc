"""Pretrained encoders know where a clip ends, and train as the field does."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.inference.formats.traced import trace
from sbkit.models.pretrained.parts import PretrainedFeatures
from tests.models.pretrained.folders import make_parts, tiny_config

VARIANTS = [
    tiny_config(family, feat_extract_norm=norm, do_stable_layer_norm=stable, conv_bias=stable)
    for family, norm, stable in product(
        ("wav2vec2", "hubert", "wavlm"), ("group", "layer"), (False, True)
    )
]
CONFORMERS = [tiny_config("wav2vec2-bert"), tiny_config("parakeet_encoder")]
PLAIN: dict[str, Any] = {
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "mask_time_prob": 0.0,
    "mask_channel_prob": 0.0,
}


def name_of(config: dict[str, Any]) -> str:
    norm, stable = config.get("feat_extract_norm", ""), config.get("do_stable_layer_norm", "")
    return f"{config['model_type']}-{norm}-{stable}"


class Whole(nn.Module):
    """Features, front-end and encoder: (B, S), (B,) -> (B, U, D), (B,)."""

    def __init__(self, config: dict[str, Any], **knobs: Any) -> None:
        super().__init__()
        self.features = PretrainedFeatures(config=config)
        self.front_end, self.encoder = make_parts(config, **knobs)
        self.eval()

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, counted = self.front_end(*self.features(audio, lengths))
        return self.encoder.encode(x, counted), counted

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        return self.front_end.frame_lengths(self.features.frame_lengths(lengths))


@pytest.mark.parametrize("config", VARIANTS + CONFORMERS, ids=name_of)
@torch.no_grad()
def test_a_clip_is_the_same_alone_and_beside_a_longer_one(config: dict[str, Any]) -> None:
    model = Whole(config)
    lengths = torch.tensor([6000, 1601, 47, 3])
    audio = torch.randn(4, 6000)
    together, counts = model(audio, lengths)  # what lies beyond a clip is not zero
    assert together.isfinite().all()
    assert counts.tolist() == model.frame_lengths(lengths).tolist()
    for row, length in enumerate(lengths):
        alone, count = model(audio[row : row + 1, :length], length.view(1))
        assert count == counts[row]
        within = slice(int(count))
        torch.testing.assert_close(together[row, within], alone[0, within], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS + CONFORMERS, ids=name_of)
def test_every_parameter_gets_a_gradient_and_no_buffer_changes(config: dict[str, Any]) -> None:
    knobs = {"layers": "weighted", "layerdrop": 0.5, "attention_dropout": 0.1, "dropout": 0.1}
    model = Whole(config, **knobs).train()
    before = {name: each.clone() for name, each in model.named_buffers()}
    states, _ = model(torch.randn(2, 6000), torch.tensor([6000, 1900]))
    states.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    for name, each in model.named_buffers():
        assert torch.equal(each, before[name]), name


@pytest.mark.parametrize("config", [VARIANTS[0], VARIANTS[-1], *CONFORMERS], ids=name_of)
@torch.no_grad()
def test_it_is_traced_for_any_batch_and_length(config: dict[str, Any]) -> None:
    model = Whole(config)
    program = trace(model, torch.randn(3, 6000), torch.tensor([6000, 4000, 2000])).module()
    for lengths in (torch.tensor([3001]), torch.tensor([8888, 5000])):
        audio = torch.randn(len(lengths), int(lengths.max()))
        states, counts = program(audio, lengths)
        expected, count = model(audio, lengths)
        assert counts.tolist() == count.tolist()
        torch.testing.assert_close(states, expected, rtol=0.0, atol=1e-5)

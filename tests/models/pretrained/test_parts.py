"""Pretrained encoders know where a clip ends, and train as the field does."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sbkit.models.pretrained.parts import PretrainedFeatures
from tests.models.pretrained.folders import make_parts, tiny_config

VARIANTS = [
    tiny_config(family, feat_extract_norm=norm, do_stable_layer_norm=stable, conv_bias=stable)
    for family, norm, stable in product(
        ("wav2vec2", "hubert", "wavlm"), ("group", "layer"), (False, True)
    )
]
PLAIN: dict[str, Any] = {
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "mask_time_prob": 0.0,
    "mask_channel_prob": 0.0,
}


def name_of(config: dict[str, Any]) -> str:
    norm, stable = config.get("feat_extract_norm", ""), config.get("do_stable_layer_norm", "")
    return f"{config['model_type']}-{norm}-{stable}"


def encode(config: dict[str, Any], parts: Any, audio: Tensor, *lengths: int) -> Tensor:
    """Compute states (B, U, D)."""
    features, counted = PretrainedFeatures(config=config)(audio, torch.tensor(lengths))
    x, counted = parts[0](features, counted)
    states: Tensor = parts[1].encode(x, counted)
    return states


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
@torch.no_grad()
def test_a_clip_is_the_same_alone_and_beside_a_longer_one(config: dict[str, Any]) -> None:
    parts = make_parts(config)
    lengths = torch.tensor([3000, 801, 47, 3])
    audio = torch.randn(4, 3000)
    together = encode(config, parts, audio, *lengths)  # what lies beyond a clip is not zero
    assert together.isfinite().all()
    for row, length in enumerate(lengths):
        alone = encode(config, parts, audio[row : row + 1, :length], length)[0]
        counted = int(parts[0].frame_lengths(length))
        assert counted == length // 40
        torch.testing.assert_close(together[row, :counted], alone[:counted], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_every_parameter_gets_a_gradient(config: dict[str, Any]) -> None:
    knobs = {"layers": "weighted", "layerdrop": 0.5, "attention_dropout": 0.1, "dropout": 0.1}
    parts = make_parts(config, **knobs)
    for part in parts:
        part.train()
    encode(config, parts, torch.randn(2, 3000), 3000, 900).square().sum().backward()
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name

"""The encoders compute what transformers does, on clips alone; all that imports it stands here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from sbkit.models.pretrained.parts import (
    PretrainedFeatures,
)
from tests.models.pretrained.folders import file_tensors, make_folder, make_parts, tiny_config

LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("wav2vec2", {}),
    ("wav2vec2", LARGE),
    ("wav2vec2", {"feat_extract_norm": "layer"}),
    ("wav2vec2", {"do_stable_layer_norm": True, "conv_bias": True}),
    ("hubert", {}),
    ("hubert", LARGE),
    ("hubert", {"feat_proj_layer_norm": False}),
    ("wavlm", {}),
    ("wavlm", LARGE),
]


def clip(samples: int) -> Tensor:
    return torch.randn(1, samples, generator=torch.Generator().manual_seed(samples)) * 0.1


def states(config: dict[str, Any], audio: Tensor, lengths: Tensor, *parts: Any) -> Tensor:
    features, frames = PretrainedFeatures(config=config)(audio, lengths)
    x, frames = parts[0](features, frames)
    return parts[1].encode(x, frames)


@pytest.mark.parametrize(("model_type", "config"), VARIANTS)
@torch.no_grad()
def test_states_are_those_of_transformers(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, model_type, **config)
    theirs = AutoModel.from_pretrained(folder).eval()
    full = tiny_config(model_type, **config)
    parts = make_parts(full)
    assert theirs.state_dict().keys() == file_tensors(*parts).keys()
    for samples in (1000, 4321):
        audio, lengths = clip(samples), torch.tensor([samples])
        normal = (audio - audio.mean()) / (audio.var(correction=0) + 1e-7).sqrt()
        expected = theirs(normal).last_hidden_state
        torch.testing.assert_close(
            states(full, audio, lengths, *parts), expected, rtol=0.0, atol=1e-5
        )

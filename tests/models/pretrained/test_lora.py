"""Adapters train in every family of pretrained encoders, and merge into its weights."""

from typing import Any

import pytest
import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.models.pretrained.encoder import FAMILIES, PretrainedEncoder
from sbkit.models.pretrained.lora import LoraLinear, merge_adapters
from tests.models.pretrained.folders import encode, make_parts, tiny_config

AUDIO, LENGTHS = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1)), (4000, 3000)


def projections(encoder: PretrainedEncoder) -> list[str]:
    modules = encoder.body.named_modules()
    return sorted({path.split(".")[-1] for path, m in modules if isinstance(m, nn.Linear)})


def make_adapted(model_type: str, **options: Any) -> tuple[nn.Module, PretrainedEncoder]:
    """Make front-end and encoder with a random adapter of each Linear layer."""
    _, plain = make_parts(tiny_config(model_type))
    lora = {"rank": 2, "alpha": 6, "projections": projections(plain)}
    return make_parts(tiny_config(model_type), lora=lora, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_only_adapters_get_gradients(model_type: str, recompute: bool) -> None:
    """WavLM included, whose projections other libraries pass straight to a functional."""
    front_end, encoder = make_adapted(model_type, gradient_checkpointing=recompute, layerdrop=0.0)
    parts = (front_end, encoder.train())
    encode(tiny_config(model_type), parts, AUDIO, *LENGTHS).square().sum().backward()
    gradients = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    assert {name for name, p in encoder.named_parameters() if p.requires_grad} == {*gradients}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    adapters = {name for name in gradients if ".lora_" in name}
    layers = [m for m in encoder.modules() if isinstance(m, nn.Linear)]
    assert len(adapters) == 2 * len(layers) == len(gradients)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_merged_adapters_compute_the_same(model_type: str) -> None:
    config = tiny_config(model_type)
    (front_end, encoder), (_, merged) = make_adapted(model_type), make_parts(config)
    before = encode(config, (front_end, merged), AUDIO, *LENGTHS)
    merged.load_state_dict(merge_adapters(encoder.state_dict()))
    after = encode(config, (front_end, merged), AUDIO, *LENGTHS)
    unmerged = encode(config, (front_end, encoder), AUDIO, *LENGTHS)
    torch.testing.assert_close(after, unmerged, atol=1e-5, rtol=0)
    assert (before - unmerged).abs().max() > 1e-2


def test_adapter_adds_alpha_over_rank_times_its_product() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    adapter = LoraLinear(layer, rank=2, alpha=6)
    assert torch.equal(adapter(x), layer(x))
    nn.init.normal_(adapter.lora_b)
    update = 6 / 2 * x @ adapter.lora_a.T @ adapter.lora_b.T
    torch.testing.assert_close(adapter(x), layer(x) + update)


def test_invalid_options_are_refused() -> None:
    for rank, name, message in (
        (2, "query", r"is \['q_proj', 'query'\], but .* out_proj"),
        (0, "v_proj", "`rank` .* 0"),
    ):
        lora = {"rank": rank, "projections": ["q_proj", name]}
        with pytest.raises(SbkitError, match=message):
            PretrainedEncoder(config=tiny_config("wav2vec2"), lora=lora)

"""Adapters of every family of pretrained encoders learn, alone, and are merged on export."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.pretrained.lora import LoraLinear, merge_adapters
from sbkit.models.pretrained.parts import FAMILIES, PretrainedEncoder, PretrainedFeatures
from tests.models.pretrained.folders import make_parts, tiny_config

LENGTHS = torch.tensor([4000, 3000])  # samples


def projections(encoder: PretrainedEncoder) -> list[str]:
    """Name all Linear layers of an encoder."""
    layers = encoder.body.named_modules()
    return sorted({name.split(".")[-1] for name, each in layers if isinstance(each, nn.Linear)})


def adapted(model_type: str, **knobs: Any) -> tuple[Any, PretrainedEncoder]:
    """Make front-end and encoder with an adapter of each Linear layer, of random weights."""
    _, plain = make_parts(tiny_config(model_type))
    lora = {"rank": 2, "alpha": 6, "projections": projections(plain)}
    return make_parts(tiny_config(model_type), lora=lora, **knobs)


def states_of(front_end: nn.Module, encoder: PretrainedEncoder, config: Any) -> Tensor:
    audio = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    features = PretrainedFeatures(config=config)(audio, LENGTHS)
    x, lengths = front_end(*features)
    return encoder.encode(x, lengths)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_adapter_gets_a_gradient_and_nothing_else_of_the_encoder(
    model_type: str, again: bool
) -> None:
    """In WavLM, too, whose projections in others' code go straight into a functional."""
    front_end, encoder = adapted(
        model_type, layers="weighted", gradient_checkpointing=again, layerdrop=0.0
    )
    states_of(front_end, encoder.train(), tiny_config(model_type)).square().sum().backward()
    learning = {name: each for name, each in encoder.named_parameters() if each.grad is not None}
    assert {name for name, each in encoder.named_parameters() if each.requires_grad} == {*learning}
    assert all(each.grad.abs().max() > 0 for each in learning.values())
    adapters = {name for name in learning if ".lora_" in name}
    layers = [each for each in encoder.modules() if isinstance(each, nn.Linear)]
    assert len(adapters) == 2 * len(layers) and learning.keys() - adapters == {"layer_weights"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_merged_they_compute_the_same(model_type: str) -> None:
    config = tiny_config(model_type)
    front_end, encoder = adapted(model_type)
    merged = make_parts(config)[1]
    before = states_of(front_end, merged, config)
    merged.load_state_dict(merge_adapters(encoder.state_dict()))
    unmerged = states_of(front_end, encoder, config)
    torch.testing.assert_close(states_of(front_end, merged, config), unmerged, atol=1e-5, rtol=0)
    assert (before - unmerged).abs().max() > 1e-2


def test_an_adapter_adds_alpha_over_rank_of_its_product_and_at_first_nothing() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    adapter = LoraLinear(layer, rank=2, alpha=6)
    assert torch.equal(adapter(x), layer(x))
    nn.init.normal_(adapter.lora_b)
    change = 6 / 2 * x @ adapter.lora_a.T @ adapter.lora_b.T
    torch.testing.assert_close(adapter(x), layer(x) + change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"projections": ["q_proj", "query"]}, r"out_proj.*but is \['q_proj', 'query'\]"),
        ({"projections": []}, r"but is \[\]"),
        ({"rank": 0}, "`rank` must be a whole number of at least 1, but is 0"),
    ],
)
def test_a_name_that_no_layer_has_is_refused(change: dict[str, Any], words: str) -> None:
    lora = {"rank": 2, "projections": ["q_proj"], **change}
    with pytest.raises(SbkitError, match=words):
        PretrainedEncoder(config=tiny_config("wav2vec2"), lora=lora)

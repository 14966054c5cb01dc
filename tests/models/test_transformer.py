"""The output of an utterance depends on that utterance only."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.base.errors import ConfigError
from sbkit.models.transformer import (
    ConformerBlock,
    FrameContext,
    SelfAttention,
    Transformer,
    additive_mask,
    rotary_cos_sin,
)

SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "d_ffn": 24, "num_encoder_layers": 2}
CPU = torch.device("cpu")
STREAMING = (None, {"chunk_ms": 120, "left_ms": 160})
each_encoder = pytest.mark.parametrize(
    ("block", "streaming"), [*product(("conformer", "transformer"), STREAMING)]
)


def make_transformer(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{**SIZES, **changes}).eval()


def test_conformer_block_halves_both_feed_forwards() -> None:
    torch.manual_seed(0)
    block = ConformerBlock(d_model=16, nhead=2, d_ffn=24, kernel_size=3, dropout=0.0)
    for part in (block.attention, block.convolution):
        for parameter in part.out_proj.parameters():
            nn.init.zeros_(parameter)
    x = torch.randn(1, 7, 16)
    half = (x + block.feed_forward1(x)) / 2  # a FeedForward adds x
    expected = (half + block.feed_forward2(half)) / 2
    mask = torch.ones(1, 7, dtype=torch.bool)
    frames = FrameContext(
        mask, additive_mask(mask, x), rotary_cos_sin(7, 8, CPU), chunk_frames=None
    )
    torch.testing.assert_close(block(x, frames), expected)


@each_encoder
def test_gradients_are_finite_without_frames_and_reach_every_parameter(
    block: str, streaming: dict[str, int] | None
) -> None:
    options = {"encoder_module": block, "streaming": streaming}
    model = make_transformer(**options, num_decoder_layers=2, vocab_size=9).train(not streaming)
    x, lengths = torch.randn(3, 7, 16, requires_grad=True), torch.tensor([7, 4, 0])
    states, _ = model(x, lengths)
    decoded = model.decode(torch.arange(9).repeat(3, 1), states, lengths)
    (decoded * torch.randn_like(decoded)).sum().backward()
    assert states.isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"encoder_module": "branchformer"}, "conformer or transformer, but is 'branchformer'"),
        ({"num_decoder_layers": 1}, "1 decoder layers need `vocab_size`"),
        ({"nhead": 16}, "multiple of twice `nhead`, but `d_model` is 16 and `nhead` is 16"),
        ({"kernel_size": 4}, "`kernel_size` must be odd, but is 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_transformer(**options)


def test_first_call_may_be_an_export() -> None:
    model = make_transformer(d_model=24)  # a size of its own
    inputs = (torch.randn(1, 9, 24), torch.tensor([9]))
    program = torch.export.export(model, inputs, strict=False)
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


def test_exported_attention_uses_products_and_is_the_same() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(d_model=16, nhead=2, dropout=0.0).eval()
    x, visible = torch.randn(3, 9, 16), torch.arange(9) < torch.tensor([[9], [5], [1]])
    inputs = (x, additive_mask(visible[:, None, None], x), rotary_cos_sin(9, 8, CPU))
    expected = attention(*inputs)
    program = torch.export.export(attention, inputs, strict=False)
    assert not [node for node in program.graph.nodes if "dot_product" in node.name]
    torch.testing.assert_close(program.module()(*inputs), expected)


def test_gradient_checkpointing_keeps_the_gradients() -> None:
    def gradients(**options: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Transformer(**SIZES, dropout=0.2, **options)
        states, _ = model(torch.randn(2, 9, 16), torch.tensor([9, 5]))
        return [states, *torch.autograd.grad(states.square().sum(), model.parameters())]

    for plain, recomputed in zip(gradients(), gradients(gradient_checkpointing=True), strict=True):
        assert torch.equal(plain, recomputed)

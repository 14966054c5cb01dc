"""An utterance's output depends on the utterance alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.attention import SelfAttention
from sbkit.models.transformer import ConformerBlock, Transformer

KINDS = ["conformer", "transformer"]
SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "d_ffn": 24, "num_encoder_layers": 2}


def transformer(**changes: Any) -> Transformer:
    """Make a small one, in eval mode."""
    torch.manual_seed(0)
    return Transformer(**{**SIZES, **changes}).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_in_the_padding_changes_nothing(kind: str) -> None:
    model = transformer(encoder_module=kind, num_decoder_layers=1, vocab_size=9)
    x, lengths = torch.randn(2, 12, 16), torch.tensor([12, 5])
    tokens = torch.randint(4, 9, (2, 3))
    garbage = x.clone()
    garbage[1, 5:] = 1e3 * torch.randn(7, 16)
    clean, dirty = model.encode(x, lengths), model.encode(garbage, lengths)
    torch.testing.assert_close(dirty[1, :5], clean[1, :5], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(dirty[0], clean[0], rtol=0.0, atol=1e-5)
    heard = model.decode(tokens, clean, lengths)
    torch.testing.assert_close(model.decode(tokens, dirty, lengths), heard, rtol=0.0, atol=1e-5)


def test_a_later_token_never_changes_an_earlier_output() -> None:
    place, model = 2, transformer(num_decoder_layers=2, vocab_size=9)
    states, lengths = torch.randn(1, 6, 16), torch.tensor([6])
    tokens = torch.tensor([[4, 5, 6, 7, 8]])
    other = tokens.clone()
    other[0, place] = 3
    first, second = (model.decode(each, states, lengths)[0] for each in (tokens, other))
    assert torch.equal(first[:place], second[:place])
    assert not torch.isclose(first[place:], second[place:]).all(-1).any()


def test_attention_hears_distances_and_not_places() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(d_model=16, nhead=2, dropout=0.0)
    x, silence = torch.randn(1, 7, 16), torch.zeros(1, 3, 16)
    inside = torch.ones(1, 7, dtype=torch.bool)
    late = attention(torch.cat([silence, x], 1), torch.cat([~inside[:, :3], inside], 1))
    torch.testing.assert_close(late[:, 3:], attention(x, inside), rtol=0.0, atol=1e-5)


def test_a_conformer_block_has_half_a_feed_forward_at_either_end() -> None:
    torch.manual_seed(0)
    block = ConformerBlock(d_model=16, nhead=2, d_ffn=24, kernel_size=3, dropout=0.0)
    for between in (block.attention, block.convolution):
        for parameter in between.out_proj.parameters():
            nn.init.zeros_(parameter)
    x = torch.randn(1, 7, 16)
    half = (x + block.feed_forward1(x)) / 2  # which adds to x what it makes of it
    expected = (half + block.feed_forward2(half)) / 2
    torch.testing.assert_close(block(x, torch.ones(1, 7, dtype=torch.bool)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_utterance_without_a_frame_poisons_nothing(kind: str) -> None:
    model = transformer(encoder_module=kind, num_decoder_layers=1, vocab_size=9).train()
    x = torch.randn(2, 7, 16, requires_grad=True)
    lengths = torch.tensor([7, 0])
    states = model.encode(x, lengths)
    out = states[0].sum() + model.decode(torch.tensor([[2, 5], [2, 6]]), states, lengths).sum()
    out.backward()
    assert states.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(kind: str) -> None:
    model = transformer(encoder_module=kind, num_decoder_layers=2, vocab_size=9, dropout=0.0)
    lengths = torch.tensor([7, 4])
    states = model.encode(torch.randn(2, 7, 16), lengths)
    decoded = model.decode(torch.arange(9).repeat(2, 1), states, lengths)
    (decoded * torch.randn_like(decoded)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SbkitError, match="conformer or transformer, but is 'branchformer'"):
        transformer(encoder_module="branchformer")
    with pytest.raises(SbkitError, match="1 decoder layers needs `vocab_size`"):
        transformer(num_decoder_layers=1)


def test_exported_attention_is_made_of_products_and_the_same() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(d_model=16, nhead=2, dropout=0.0).eval()
    x, mask = torch.randn(3, 9, 16), torch.arange(9) < torch.tensor([[9], [5], [1]])
    expected = attention(x, mask)
    program = torch.export.export(attention, (x, mask), strict=False)
    assert not [node for node in program.graph.nodes if "dot_product" in node.name]
    torch.testing.assert_close(program.module()(x, mask), expected)


def test_blocks_that_are_computed_again_have_the_same_gradients() -> None:
    def gradients(**options: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Transformer(**SIZES, dropout=0.2, **options)
        states = model.encode(torch.randn(2, 9, 16), torch.tensor([9, 5]))
        return [states, *torch.autograd.grad(states.square().sum(), model.parameters())]

    for plain, again in zip(gradients(), gradients(gradient_checkpointing=True), strict=True):
        assert torch.equal(plain, again)

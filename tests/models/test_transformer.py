"""An utterance's output depends on the utterance alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.normalize import GlobalNorm
from sbkit.models.transformer import SelfAttention, Transformer

KINDS = ["conformer", "transformer"]
SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "d_ffn": 24, "num_encoder_layers": 2}


class Recognizer(nn.Module):
    """The road from audio to log-probabilities, of CTC and of the decoder."""

    def __init__(self, kind: str, prompts: list[Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = GlobalNorm()
        self.fbank = Fbank()
        features, lengths = self.fbank(*side_by_side(prompts))
        wide = features.double().flatten(0, 1)
        norm.set_statistics(torch.stack([wide.sum(0), wide.square().sum(0)]), lengths.sum())
        self.cnn = ConvFrontEnd(normalize=norm, n_mels=80, channels=64, d_model=64)
        self.transformer = Transformer(
            d_model=64,
            nhead=4,
            d_ffn=128,
            num_encoder_layers=3,
            num_decoder_layers=2,
            encoder_module=kind,
            vocab_size=30,
        )
        self.ctc_lin, self.seq_lin = nn.Linear(64, 30), nn.Linear(64, 30)
        self.eval()

    @torch.no_grad()
    def forward(self, clips: list[Tensor], tokens: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Give the log-probabilities (U, V) and (L, V) of every clip, without padding."""
        x, lengths = self.cnn(*self.fbank(*side_by_side(clips)))
        states = self.transformer.encode(x, lengths)
        decoded = self.transformer.decode(side_by_side(tokens)[0], states, lengths)
        heard = self.ctc_lin(states).log_softmax(-1)
        written = self.seq_lin(decoded).log_softmax(-1)
        counts = zip(lengths, [len(each) for each in tokens], strict=True)
        return [(heard[n, :frames], written[n, :end]) for n, (frames, end) in enumerate(counts)]


def side_by_side(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad rows to the longest."""
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_same_alone_in_eight_and_in_thirty_two(
    kind: str, prompts: list[Tensor]
) -> None:
    model = Recognizer(kind, prompts)
    tokens = [torch.randint(4, 30, (n % 7 + 1,)) for n in range(32)]
    everything = model(prompts, tokens)
    assert len({len(heard) for heard, _ in everything}) > 20  # much padding, and different
    for size in (1, 8):
        for start in range(0, 32, size):
            batch = slice(start, start + size)
            for (heard, written), (heard32, written32) in zip(
                model(prompts[batch], tokens[batch]), everything[batch], strict=True
            ):
                torch.testing.assert_close(heard, heard32, rtol=0.0, atol=1e-5)
                torch.testing.assert_close(written, written32, rtol=0.0, atol=1e-5)


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


@pytest.mark.parametrize("place", range(5))
def test_a_later_token_never_changes_an_earlier_output(place: int) -> None:
    model = transformer(num_decoder_layers=2, vocab_size=9)
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


BAD_SIZES: list[tuple[dict[str, Any], str]] = [
    ({"encoder_module": "branchformer"}, "conformer or transformer, but is 'branchformer'"),
    ({"d_model": 18, "nhead": 4}, "they are 18 and 4"),
    ({"d_model": 12, "nhead": 4}, "they are 12 and 4"),  # 3 a head: no pairs to turn
    ({"kernel_size": 8}, "odd, .* but is 8"),
    ({"dropout": 1.0}, "`dropout` must be .* but is 1.0"),
    ({"num_decoder_layers": 1}, "num_decoder_layers is 1, but is null"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_SIZES)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        transformer(**changes)


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

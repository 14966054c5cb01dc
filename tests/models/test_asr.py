"""One asr_model for sbkit's parts and SpeechBrain's, which owns nothing and checks everything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.models.asr import AsrModel
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import Dropout, GlobalNorm
from sbkit.models.loss import attention_loss, ctc
from sbkit.models.transformer import Transformer
from sbkit.text.vocabulary import Vocabulary

LABELS = Vocabulary(size=11)
Parts = dict[str, nn.Module]


def ours(encoder_module: str = "conformer", decoder_layers: int = 1) -> Parts:
    """Make sbkit's parts."""
    return {
        "compute_features": Fbank(n_mels=40),
        "CNN": ConvFrontEnd(normalize=GlobalNorm(n_mels=40), n_mels=40, channels=16, d_model=16),
        "Transformer": Transformer(
            d_model=16,
            nhead=2,
            d_ffn=32,
            num_encoder_layers=1,
            num_decoder_layers=decoder_layers,
            encoder_module=encoder_module,
            dropout=0.0,
            vocab_size=LABELS.size,
        ),
        "seq_lin": nn.Linear(16, LABELS.size),
        "ctc_lin": nn.Linear(16, LABELS.size),
    }


def speechbrains(encoder_module: str = "transformer", decoder_layers: int = 1) -> Parts:
    """Make the same parts of SpeechBrain."""
    conformer = encoder_module == "conformer"
    return ours() | {
        "CNN": ConvolutionFrontEnd(
            input_shape=(None, None, 40),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=[4, 4],
            kernel_sizes=[3, 3],
            strides=[2, 2],
            dilations=[1, 1],
            residuals=[False, False],
            dropout=0.0,
        ),
        "Transformer": TransformerASR(
            tgt_vocab=LABELS.size,
            input_size=40,
            d_model=16,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=decoder_layers,
            d_ffn=32,
            dropout=0.0,
            encoder_module=encoder_module,
            attention_type="RelPosMHAXL" if conformer else "regularMHA",
            normalize_before=True,
            causal=False,
        ),
    }


def asr_model(parts: Parts, vocabulary: Vocabulary = LABELS, **changes: Any) -> AsrModel:
    """Tie the parts together; all of them are in the one ModuleList unless changed."""
    owned = [parts[name] for name in ("CNN", "Transformer", "seq_lin", "ctc_lin")]
    options: dict[str, Any] = {"model": nn.ModuleList([nn.ModuleList(owned)]), **parts, **changes}
    return AsrModel(vocabulary=vocabulary, **options)


def speech() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make two clips of noise in int16's scale and their labels."""
    torch.manual_seed(0)
    audio = 1000 * torch.randn(2, 16_000)
    audio[1, 9000:] = 0
    tokens = torch.tensor([[4, 5, 6, 6], [7, 8, 0, 0]])
    return audio, torch.tensor([16_000, 9000]), tokens, torch.tensor([4, 2])


FAMILIES: list[tuple[Callable[..., Parts], str]] = [
    (ours, "conformer"),
    (ours, "transformer"),
    (speechbrains, "conformer"),
    (speechbrains, "transformer"),
]


@pytest.mark.parametrize("decoder_layers", [0, 1])
@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_every_family_of_parts_trains(
    family: Callable[..., Parts], kind: str, decoder_layers: int
) -> None:
    torch.manual_seed(0)
    model = asr_model(family(kind, decoder_layers))
    optimizer = torch.optim.Adam(model.model.parameters(), lr=0.01)
    audio, samples, tokens, counts = speech()
    losses = []
    for _ in range(8):
        if decoder_layers:
            encoded = model.run(audio, samples, tokens=tokens, return_intermediate=False)
            states, frames, logits = encoded.states, encoded.frame_lengths, encoded.logits
            assert logits is not None
            assert logits.shape == (2, 5, LABELS.size)
        else:
            states, frames = model.encode(audio, samples)
        loss = ctc(model.ctc_log_probs(states), frames, tokens, counts, LABELS.blank)
        if decoder_layers:
            loss = loss.interpolate(attention_loss(logits, tokens, counts, LABELS.eos, 0.1), 0.5)
        optimizer.zero_grad()
        loss.sums.sum().backward()
        optimizer.step()
        losses.append(float(loss.sums.detach().sum()))
    assert losses[-1] < 0.6 * losses[0]
    assert frames.tolist() == [25, 14]
    trained = [*model.model.parameters()] if decoder_layers else [*model.ctc_lin.parameters()]
    assert all(parameter.grad is not None for parameter in trained)


def test_the_middle_of_the_encoder_is_read_by_the_same_head() -> None:
    torch.manual_seed(0)
    model = asr_model(ours("conformer", 0))
    model.model.eval()
    audio, samples, _, _ = speech()
    twice = model.run(audio, samples, tokens=None, return_intermediate=True)
    states, _ = model.encode(audio, samples)
    assert torch.equal(twice.states, states)
    assert twice.intermediate is not None
    assert twice.intermediate.shape == twice.log_probs.shape
    assert not torch.allclose(twice.intermediate, twice.log_probs, atol=1e-3)
    assert twice.logits is None


def test_what_a_transformer_does_not_have_is_refused() -> None:
    audio, samples, tokens, _ = speech()
    with pytest.raises(SbkitError, match="num_decoder_layers"):
        asr_model(ours("conformer", 0)).run(
            audio, samples, tokens=tokens, return_intermediate=False
        )
    model = asr_model(speechbrains("conformer", 0))
    with pytest.raises(SbkitError, match="inter_ctc_weight"):
        model.run(audio, samples, tokens=None, return_intermediate=True)


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_states_are_decoded_later_as_in_training(family: Callable[..., Parts], kind: str) -> None:
    torch.manual_seed(0)
    model = asr_model(family(kind, 1))
    model.model.eval()
    audio, samples, tokens, counts = speech()
    out = model.run(audio, samples, tokens=tokens, return_intermediate=False)
    assert out.logits is not None
    for row, count in enumerate(counts.tolist()):
        alone = model.decoder_log_probs(
            tokens[[row], :count],
            out.states[[row], : out.frame_lengths[row]],
            out.frame_lengths[[row]],
        )
        together = out.logits[[row], : count + 1].log_softmax(-1)
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["conformer", "transformer"])
def test_a_clip_has_the_same_scores_alone_and_beside_longer_ones(
    kind: str, prompts: list[Tensor]
) -> None:
    torch.manual_seed(0)
    model = asr_model(ours(kind))
    model.model.eval()
    tokens = [torch.randint(4, LABELS.size, (n % 7 + 1,)) for n in range(32)]

    def score(rows: range) -> list[tuple[Tensor, Tensor]]:
        """Return the scores (U, V) and (L + 1, V) of both heads for each clip, without padding."""
        audio, labels = [prompts[n] for n in rows], [tokens[n] for n in rows]
        out = model.run(
            pad_sequence(audio, batch_first=True),
            torch.tensor([len(clip) for clip in audio]),
            tokens=pad_sequence(labels, batch_first=True),
            return_intermediate=False,
        )
        assert out.logits is not None
        counts = zip(out.log_probs, out.frame_lengths, out.logits, labels, strict=True)
        return [(x[:frames], y[: len(label) + 1]) for x, frames, y, label in counts]

    together = score(range(32))
    assert len({len(log_probs) for log_probs, _ in together}) > 20  # many lengths, much padding
    for size in (1, 8):
        for start in range(0, 32, size):
            rows = range(start, start + size)
            torch.testing.assert_close(
                score(rows), together[start : start + size], rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("left_out", ["CNN", "Transformer", "ctc_lin", "seq_lin"])
def test_a_part_that_the_list_does_not_own_is_named(left_out: str) -> None:
    parts = ours()
    owned = [part for name, part in parts.items() if name not in (left_out, "compute_features")]
    with pytest.raises(SbkitError, match=rf"`{left_out}` is not in its list .*!ref <{left_out}>"):
        asr_model(parts, model=nn.ModuleList(owned))


@pytest.mark.parametrize("family", [ours, speechbrains])
def test_heads_and_embeddings_of_another_size_are_refused_with_both_numbers(
    family: Callable[..., Parts],
) -> None:
    for name, head, size in (
        ("ctc_lin", nn.Linear(16, 12), 12),
        ("seq_lin", nn.Sequential(nn.Linear(16, 11), nn.ReLU(), nn.Linear(11, 9)), 9),
        ("ctc_lin", Dropout(0.1), 0),
    ):
        with pytest.raises(SbkitError, match=rf"`{name}` .* \(11\), but has {size}\."):
            asr_model(family() | {name: head})
    heads = {name: nn.Linear(16, 15) for name in ("ctc_lin", "seq_lin")}
    with pytest.raises(SbkitError, match=r"`Transformer` .* \(15\), but has 11"):
        asr_model(family() | heads, vocabulary=Vocabulary(size=15))


def test_ctc_alone_needs_neither_a_decoder_nor_its_head() -> None:
    parts = ours() | {"Transformer": nn.LSTM(16, 16, batch_first=True)}
    del parts["seq_lin"]
    model = AsrModel(model=nn.ModuleList(parts.values()), vocabulary=LABELS, **parts)
    audio, samples, tokens, _ = speech()
    out = model.run(audio, samples, tokens=None, return_intermediate=False)
    assert out.states.shape == (2, 25, 16)
    assert model.unused_modules(1.0) == ()
    with pytest.raises(SbkitError, match="LSTM .* has no decode.*--ctc_weight=1.0"):
        model.run(audio, samples, tokens=tokens, return_intermediate=False)
    parts |= {"Transformer": ours()["Transformer"]}
    model = AsrModel(model=nn.ModuleList(parts.values()), vocabulary=LABELS, **parts)
    with pytest.raises(SbkitError, match="YAML has no `seq_lin`"):
        model.run(audio, samples, tokens=tokens, return_intermediate=False)


@pytest.mark.parametrize("family", [ours, speechbrains])
def test_what_rests_with_ctc_alone_is_what_gets_no_gradient(family: Callable[..., Parts]) -> None:
    model = asr_model(family())
    out = model.run(*speech()[:2], tokens=None, return_intermediate=False)
    (model.ctc_log_probs(out.states)[..., 1].sum() + out.states.square().sum()).backward()
    resting = {id(each) for part in model.unused_modules(1.0) for each in part.parameters()}
    assert resting == {id(each) for each in model.model.parameters() if each.grad is None}
    assert model.unused_modules(0.7) == ()

"""One recognizer runs sbkit's parts and SpeechBrain's, and checks that they fit together."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.models.encoder_parts import FeatureExtractor
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import Dropout, GlobalNorm
from sbkit.models.pretrained.encoder import PretrainedFeatures
from sbkit.models.speechbrain_parts import SpeechBrainLayers, SpeechBrainTransformer
from sbkit.models.transformer import Transformer
from sbkit.tasks.asr.model import AsrModel
from sbkit.text.vocabulary import Vocabulary
from tests.models.pretrained.folders import tiny_config
from tests.models.test_transformer import each_encoder

VOCABULARY = Vocabulary(size=11)
Parts = dict[str, nn.Module]
Family = Callable[..., Parts]


def sbkit_parts(
    encoder_module: str = "conformer",
    decoder_layers: int = 1,
    *,
    streaming: dict[str, int] | None = None,
    subsampling: int = 4,
    level: str = "none",
    **options: Any,
) -> Parts:
    norm = GlobalNorm(n_mels=40)
    norm.mean.fill_(5)  # with these statistics, zeros of the padding become something else
    norm.std.fill_(4)
    frames: dict[str, Any] = {"streaming": streaming, "subsampling": subsampling}
    transformer = Transformer(
        d_model=16,
        nhead=2,
        d_ffn=32,
        num_decoder_layers=decoder_layers,
        encoder_module=encoder_module,
        vocab_size=VOCABULARY.size,
        **{"num_encoder_layers": 1, "dropout": 0.0, **frames, **options},
    )
    return {
        "compute_features": Fbank(n_mels=40, level=level),
        "CNN": ConvFrontEnd(normalize=norm, n_mels=40, channels=16, d_model=16, **frames),
        "Transformer": transformer,
        "seq_lin": nn.Linear(16, VOCABULARY.size),
        "ctc_lin": nn.Linear(16, VOCABULARY.size),
    }


def speechbrain_cnn(*strides: int, n_mels: int, channels: int) -> nn.Module:
    count = len(strides)
    return ConvolutionFrontEnd(
        input_shape=(None, None, n_mels),
        num_blocks=count,
        num_layers_per_block=1,
        out_channels=[channels] * count,
        kernel_sizes=[3] * count,
        strides=[*strides],
        residuals=[False] * count,
        dropout=0.0,
    )


def speechbrain_parts(encoder_module: str = "transformer", decoder_layers: int = 1) -> Parts:
    is_conformer = encoder_module == "conformer"
    return sbkit_parts() | {
        "CNN": SpeechBrainLayers(subsampling=4, convs=speechbrain_cnn(2, 2, n_mels=40, channels=4)),
        "Transformer": SpeechBrainTransformer(
            tgt_vocab=VOCABULARY.size,
            input_size=40,
            d_model=16,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=decoder_layers,
            d_ffn=32,
            dropout=0.0,
            encoder_module=encoder_module,
            attention_type="RelPosMHAXL" if is_conformer else "regularMHA",
            normalize_before=True,
            causal=False,
        ),
    }


def make_model(parts: Parts, vocabulary: Vocabulary = VOCABULARY, **changes: Any) -> AsrModel:
    """Make a model of the parts; the one ModuleList owns them all unless changed."""
    owned = [parts[name] for name in ("CNN", "Transformer", "seq_lin", "ctc_lin")]
    options: dict[str, Any] = {"model": nn.ModuleList([nn.ModuleList(owned)]), **parts, **changes}
    return AsrModel(vocabulary=vocabulary, **options)


def make_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make two clips of noise in the scale of int16, and tokens for them."""
    torch.manual_seed(0)
    audio = 1000 * torch.randn(2, 16_000)
    audio[1, 9000:] = 0
    tokens = torch.tensor([[4, 5, 6, 6], [7, 8, 0, 0]])
    return audio, torch.tensor([16_000, 9000]), tokens, torch.tensor([4, 2])


BOTH: list[Family] = [sbkit_parts, speechbrain_parts]


def test_intermediate_states_are_scored_by_the_same_head() -> None:
    torch.manual_seed(0)
    model = make_model(sbkit_parts("conformer", 0))
    model.model.eval()
    audio, samples, _, _ = make_batch()
    out = model.run(audio, samples, tokens=None, return_intermediate=True)
    assert torch.equal(out.states, model.encode(audio, samples)[0]) and out.logits is None
    assert out.intermediate is not None and out.intermediate.shape == out.log_probs.shape
    assert not torch.allclose(out.intermediate, out.log_probs, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("family", "block"), [*product(BOTH, ("conformer", "transformer"))])
def test_decoder_log_probs_equal_those_of_training(family: Family, block: str) -> None:
    torch.manual_seed(0)
    model = make_model(family(block, 1))
    model.model.eval()
    audio, samples, tokens, counts = make_batch()
    out = model.run(audio, samples, tokens=tokens, return_intermediate=False)
    for row, count in enumerate(counts.tolist()):
        single = model.decoder_log_probs(
            tokens[[row], :count],
            out.states[[row], : out.frame_lengths[row]],
            out.frame_lengths[[row]],
        )
        trained = out.logits[[row], : count + 1].log_softmax(-1)
        torch.testing.assert_close(single, trained, rtol=1e-4, atol=1e-4)


class LateEncoder(nn.Module):
    """Return the level of each frame of 80 ms a frame late, at another rate than 16 kHz."""

    sample_rate = 8000
    subsampling = 640

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        levels = audio.unfold(1, 640, 640).abs().mean(-1, keepdim=True)  # (B, U, 1)
        return nn.functional.pad(levels, (0, 0, 1, 0))[:, :-1], lengths // 640


@torch.no_grad()
def test_zeros_follow_each_clip_except_in_training() -> None:
    """Each is followed by 0.2 s of its own, whatever the padding of the batch holds."""
    head = nn.Linear(1, VOCABULARY.size)
    head.weight[:] = head.bias[:] = 0
    head.weight[5] = 1  # of loud frames
    model = AsrModel(
        model=nn.ModuleList([head]), vocabulary=VOCABULARY, ctc_lin=head, encoder=LateEncoder()
    )
    audio, samples = 1000 * torch.ones(2, 6400), torch.tensor([6400, 3840])
    for is_training, written in ((True, [9, 5]), (False, [10, 6])):
        model.model.train(is_training)
        out = model.run(audio, samples, tokens=None, return_intermediate=False)
        rows = zip(out.log_probs.argmax(-1), out.frame_lengths, written, strict=True)
        assert all(row[:frames].tolist().count(5) == count for row, frames, count in rows)
    log_probs, frames = model.predict(audio, samples)
    assert torch.equal(log_probs, out.log_probs) and frames.tolist() == [12, 8]


LEVELS = [Fbank(level=level) for level in ("utterance", "running", "none")]
WHISPER = PretrainedFeatures(config=tiny_config("whisper"))  # the zeros change those of wav2vec 2.0


@pytest.mark.parametrize("features", [*LEVELS, WHISPER], ids=repr)
def test_zeros_after_a_clip_leave_its_features(features: nn.Module, prompts: list[Tensor]) -> None:
    extract = FeatureExtractor(features.eval())
    clips = [clip.float() for clip in prompts[:3]]
    samples = torch.tensor([len(clip) for clip in clips])
    padded = pad_sequence(clips, batch_first=True)
    plain, frames = extract(padded, samples)
    longer, more_frames = extract(padded, samples, tail=3200)
    assert torch.equal(more_frames, extract.subsampling.count(samples + 3200))
    for row, count in enumerate(frames.tolist()):
        torch.testing.assert_close(longer[row, :count], plain[row, :count], rtol=0, atol=1e-5)
        silence = longer[row, count + 3 : more_frames[row]]
        assert torch.equal(silence, silence[:1].expand_as(silence)) or features is LEVELS[1]
        assert (silence <= plain[row, :count].amin(0) + 1e-4).all()


@torch.no_grad()
@each_encoder
def test_scores_of_a_clip_do_not_depend_on_its_batch(
    block: str, streaming: dict[str, int] | None, prompts: list[Tensor]
) -> None:
    torch.manual_seed(0)
    model = make_model(sbkit_parts(block, streaming=streaming))
    model.model.eval()
    tokens = [torch.randint(4, VOCABULARY.size, (n % 7 + 1,)) for n in range(32)]

    def score(rows: range) -> list[tuple[Tensor, Tensor]]:
        """Return the scores (U, V) and (L + 1, V) of both heads for each clip, without padding."""
        audio, targets = [prompts[n] for n in rows], [tokens[n] for n in rows]
        out = model.run(
            pad_sequence(audio, batch_first=True),
            torch.tensor([len(clip) for clip in audio]),
            tokens=pad_sequence(targets, batch_first=True),
            return_intermediate=False,
        )
        rows_of_batch = zip(out.log_probs, out.frame_lengths, out.logits, targets, strict=True)
        return [(x[:frames], y[: len(target) + 1]) for x, frames, y, target in rows_of_batch]

    batch = score(range(32))
    assert len({len(log_probs) for log_probs, _ in batch}) > 20  # many lengths, much padding
    for size in (1, 8):
        for start in range(0, 32, size):
            scores, expected = score(range(start, start + size)), batch[start : start + size]
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", BOTH)
def test_heads_and_embeddings_of_another_size_are_refused(family: Family) -> None:
    for name, head, size in (
        ("ctc_lin", nn.Linear(16, 12), 12),
        ("seq_lin", nn.Sequential(nn.Linear(16, 11), nn.ReLU(), nn.Linear(11, 9)), 9),
        ("ctc_lin", Dropout(0.1), 0),
    ):
        with pytest.raises(SbkitError, match=rf"`{name}` .* \(11\), but has {size}\."):
            make_model(family() | {name: head})
    heads = {name: nn.Linear(16, 15) for name in ("ctc_lin", "seq_lin")}
    with pytest.raises(SbkitError, match=r"`Transformer` .* \(15\), but has 11"):
        make_model(family() | heads, vocabulary=Vocabulary(size=15))


def test_ctc_only_needs_neither_decoder_nor_seq_lin() -> None:
    parts = sbkit_parts() | {"Transformer": nn.Linear(16, 16)}
    del parts["seq_lin"]
    model = AsrModel(model=nn.ModuleList(parts.values()), vocabulary=VOCABULARY, **parts)
    audio, samples, tokens, _ = make_batch()
    out = model.run(audio, samples, tokens=None, return_intermediate=False)
    assert out.states.shape == (2, 25, 16)
    assert not model.has_decoder
    with pytest.raises(SbkitError, match="Linear .* has no attention decoder.*`ctc_weight: 1.0`"):
        model.run(audio, samples, tokens=tokens, return_intermediate=False)
    parts |= {"Transformer": sbkit_parts()["Transformer"]}
    model = AsrModel(model=nn.ModuleList(parts.values()), vocabulary=VOCABULARY, **parts)
    with pytest.raises(SbkitError, match="needs `seq_lin`, but the YAML has none") as training:
        model.run(audio, samples, tokens=tokens, return_intermediate=False)
    with pytest.raises(SbkitError) as decoding:  # where ctc_weight does not matter
        model.decoder_log_probs(tokens, out.states, out.frame_lengths)
    assert str(decoding.value) == str(training.value)
    assert "`attention_rescoring: False`" in str(decoding.value)

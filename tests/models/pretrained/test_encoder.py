"""Pretrained encoders ignore the padding, train as published, and export."""

from itertools import product
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from sbkit.export.onnx_graph import make_onnx
from sbkit.export.trace import quiet_exporters, trace
from sbkit.models.pretrained.blocks import draw_spans, mask_spans
from sbkit.models.pretrained.encoder import PretrainedFeatures, warn_of_padding
from tests.models.pretrained.folders import encode, make_parts, tiny_config

VARIANTS = [
    tiny_config(family, feat_extract_norm=norm, do_stable_layer_norm=stable, conv_bias=stable)
    for family in ("wav2vec2", "hubert", "wavlm")
    for norm, stable in product(("group", "layer"), (False, True))
]
OTHERS = [tiny_config(family) for family in ("wav2vec2-bert", "parakeet_encoder", "whisper")]
RATES = ("layerdrop", "activation_dropout", "mask_time_prob", "mask_channel_prob")
PLAIN: dict[str, Any] = dict.fromkeys(RATES, 0.0)


def name_of(config: dict[str, Any]) -> str:
    norm, stable = config.get("feat_extract_norm", ""), config.get("do_stable_layer_norm", "")
    return f"{config['model_type']}-{norm}-{stable}"


@pytest.mark.parametrize("config", VARIANTS + OTHERS, ids=name_of)
@torch.no_grad()
def test_states_of_a_clip_do_not_depend_on_its_batch(config: dict[str, Any]) -> None:
    parts = make_parts(config)
    lengths = torch.tensor([3000, 801, 47, 3])
    audio = torch.randn(4, 3000)
    batch = encode(config, parts, audio, *lengths)  # the padding of the audio is not zero
    assert batch.isfinite().all()
    for row, length in enumerate(lengths):
        single = encode(config, parts, audio[row : row + 1, :length], length)[0]
        subsampling = PretrainedFeatures(config=config).subsampling
        for part in parts:
            subsampling = subsampling.then(part.subsampling)
        count = int(subsampling.count(length))
        atol = 1e-3 if config["model_type"] == "parakeet_encoder" else 1e-5  # float32 spectra
        torch.testing.assert_close(batch[row, :count], single[:count], rtol=0.0, atol=atol)


def test_encoder_of_transformers_that_sees_padding_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("wav2vec2-bert")
    features, (_, encoder) = PretrainedFeatures(config=config), make_parts(config)
    warn_of_padding(features, encoder)
    assert not caplog.text
    body = encoder.body
    monkeypatch.setattr(body, "forward", lambda x, **_: type(body).forward(body, x))
    warn_of_padding(features, encoder)
    assert "Wav2Vec2BertModel of transformers sees the padding of a batch" in caplog.text


def test_batch_norms_keep_their_statistics_in_training() -> None:
    config = tiny_config("parakeet_encoder")
    parts = make_parts(config)
    before = [b.clone() for part in parts for b in part.train().buffers()]
    assert before
    encode(config, parts, torch.randn(2, 3000), 3000, 900)
    torch.testing.assert_close([b for part in parts for b in part.buffers()], before)


def train_step(config: dict[str, Any], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the states of a training step with a fixed seed, and the encoder's gradients."""
    front_end, encoder = make_parts(config, **options)
    encoder.train()
    torch.manual_seed(3)
    states = encode(config, (front_end, encoder), torch.randn(2, 3000), 3000, 2100)
    states.square().sum().backward()
    return states, [p.grad for p in encoder.parameters() if p.grad is not None]


@pytest.mark.parametrize("model_type", ["wav2vec2", "wavlm"])
def test_gradient_checkpointing_changes_nothing(model_type: str) -> None:
    config = tiny_config(model_type, num_hidden_layers=5)
    options = {"dropout": 0.2, "attention_dropout": 0.2, "layerdrop": 0.4, "mask_channel_length": 5}
    checkpointed = train_step(config, **options, gradient_checkpointing=True)
    torch.testing.assert_close(checkpointed, train_step(config, **options), rtol=0.0, atol=0.0)


def test_layerdrop_is_the_share_of_skipped_layers() -> None:
    _, encoder = make_parts(tiny_config(num_hidden_layers=5), **PLAIN | {"layerdrop": 0.2})
    computed: list[nn.Module] = []
    for layer in encoder.body.layers:
        layer.register_forward_hook(lambda layer, *_: computed.append(layer))
    torch.manual_seed(0)
    for _ in range(40):
        encoder.train()(torch.randn(1, 9, 16), torch.tensor([9]))
    assert len(computed) / 200 == pytest.approx(0.8, abs=0.08)


def test_step_may_skip_all_layers_of_transformers() -> None:
    config = tiny_config("wav2vec2-bert")
    _, encoder = make_parts(config, **PLAIN | {"layerdrop": 1.0})
    x, lengths = torch.randn(1, 9, 40), torch.tensor([9])
    states, middle = encoder.train().encode_with_intermediate(x, lengths)
    torch.testing.assert_close(middle, states)


def test_intermediate_states_are_those_of_the_named_layer() -> None:
    config = tiny_config(do_stable_layer_norm=True)
    _, middle = make_parts(config, **PLAIN)
    _, late = make_parts(config, **PLAIN, intermediate_layer=2)
    x, lengths = torch.randn(1, 9, 16), torch.tensor([9])
    body = middle.body
    mask = torch.ones(1, 9, dtype=torch.bool)
    h, _ = body.embed_positions(body.project(x), mask)
    states = [h] + [h := layer(h, mask, None) for layer in body.layers]
    finished = [body.normalize_output(layer_states) for layer_states in states]
    for encoder, layer in ((middle, 1), (late, 2)):
        expected = finished[layer], finished[3]
        torch.testing.assert_close(encoder.encode_with_intermediate(x, lengths), expected)


def test_spans_lie_anywhere_within_a_clip_and_cover_their_share() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([200, 57, 10, 9, 1, 0]).repeat(2000)
    masked = draw_spans(lengths, 200, 0.65, 10)
    counts = masked.sum(1)
    assert not masked[torch.arange(200) >= lengths.unsqueeze(1)].any()
    assert not counts[lengths < 10].any()
    assert not ((counts > 0) & (counts < 10)).any()
    # 13 spans at 13 of 191 starts: a frame is in none of them with (1 - 10 / 191)^13 = .50
    assert counts[lengths == 200].float().mean() / 200 == pytest.approx(0.49, abs=0.01)
    assert counts[lengths == 10].float().mean() / 10 == pytest.approx(0.65, abs=0.03)
    ends = masked[lengths == 57][:, [0, 56]].float().mean(0)
    assert ends.tolist() == pytest.approx([0.65 * 57 / 10 / 48] * 2, abs=0.02)


def test_masked_frames_are_replaced_and_follow_from_the_seed() -> None:
    x, lengths = torch.randn(4, 60, 96), torch.tensor([60, 30, 12, 5])
    vector = torch.full((96,), 7.0)

    def mask() -> Tensor:
        torch.manual_seed(1)
        return mask_spans(x, lengths, frames=(0.65, 10), channels=(0.5, 64), vector=vector)

    y = mask()
    assert torch.equal(mask(), y)
    channels = (y == 0).all(1)  # (B, D): one span of 96 * .5 / 64 channels, or none
    assert {*channels.sum(1).tolist()} <= {0, 64} and channels.any()
    frames = (y == 7).any(2)  # (B, U)
    assert frames[:2].any(1).all() and not frames[3].any()  # the last is shorter than a span
    unmasked = ~(frames.unsqueeze(2) | channels.unsqueeze(1))
    assert torch.equal(y[unmasked], x[unmasked])


def test_onnxruntime_normalizes_long_audio_like_torch() -> None:
    """It adds numbers one by one: in float32, the variance of 40 s was off by 1e-4."""
    features = PretrainedFeatures(config=tiny_config()).eval()
    program = trace(features, torch.randn(3, 4000), torch.tensor([4000, 3000, 2000]))
    with quiet_exporters():
        graph = make_onnx(program, ["audio", "audio_lengths"], ["features", "lengths"])
    audio, lengths = 3000 * torch.randn(1, 640_000), torch.tensor([640_000])
    arguments = {"audio": audio.numpy(), "audio_lengths": lengths.numpy()}
    normalized, _ = onnxruntime.InferenceSession(graph.SerializeToString()).run(None, arguments)
    expected = features(audio, lengths)[0]
    torch.testing.assert_close(torch.from_numpy(normalized), expected, rtol=0.0, atol=1e-5)

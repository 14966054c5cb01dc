"""Chunk by chunk, a recognizer computes the same as on the whole clip."""

from collections.abc import Sequence
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from sbkit.base.errors import ConfigError
from sbkit.models.streaming import (
    State,
    StreamingConfig,
    split_state,
    stack_states,
    streaming_network,
)
from sbkit.models.transformer import Transformer
from sbkit.tasks.asr.model import AsrModel, StreamingAsrModel, require_frame_length
from tests.models.test_asr import VOCABULARY, sbkit_parts
from tests.models.test_asr import make_model as make_asr_model

SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "d_ffn": 24, "num_encoder_layers": 3}


def make_model(
    streaming: dict[str, int] | None, *, level: str = "running", **options: Any
) -> AsrModel:
    """Make a small recognizer with distinct outputs, in eval mode."""
    torch.manual_seed(0)
    options = {"decoder_layers": 0, "num_encoder_layers": 3, **options}
    model = make_asr_model(sbkit_parts(streaming=streaming, level=level, **options))
    model.ctc_lin.weight.data *= 10
    model.model.eval()
    model.encoder.modules["compute_features"].eval()
    return model


def declared(chunk: int, left_frames: int, subsampling: int = 4) -> dict[str, int]:
    """Return `streaming` of a YAML for a chunk and a left context in frames."""
    frame_ms = 10 * subsampling
    return {"chunk_ms": frame_ms * chunk, "left_ms": frame_ms * left_frames, "lookahead_ms": 0}


def streaming_of(model: AsrModel) -> StreamingAsrModel:
    network = streaming_network(model)
    assert isinstance(network, StreamingAsrModel)
    return network


def feed(
    stream: StreamingAsrModel, clip: Tensor, state: State, max_chunks: int = 999
) -> tuple[Tensor, State]:
    outputs, size = [torch.zeros(0, VOCABULARY.size)], stream.chunk_samples
    while len(clip) >= 400 and len(outputs) <= max_chunks:
        length = torch.tensor([min(len(clip), size)])
        rows, lengths, state = stream.forward_chunk(clip[None, :size], length, state)
        outputs.append(rows[0, : lengths[0]])
        clip = clip[stream.chunk_shift_samples :] if len(clip) >= size else clip[:0]
    return torch.cat(outputs), state


def noise(samples: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    return 3000 * drawn * torch.arange(samples).div(1500).sin()


@pytest.mark.parametrize(
    ("block", "subsampling"), [("conformer", 4), ("conformer", 8), ("transformer", 4)]
)
@pytest.mark.parametrize(
    ("chunk", "left_frames", "kernel"), [(4, 8, 5), (1, 3, 7), (3, 0, 3), (40, 2, 15)]
)
@torch.inference_mode()
def test_chunks_equal_the_whole_clip_under_a_mask(
    block: str, subsampling: int, chunk: int, left_frames: int, kernel: int
) -> None:
    options: dict[str, Any] = {"encoder_module": block, "kernel_size": kernel}
    streaming = declared(chunk, left_frames, subsampling)
    model = make_model(streaming, subsampling=subsampling, **options)
    assert model.samples_per_frame == 160 * subsampling
    stream = streaming_of(model)
    for seconds in (0.01, 0.026, 0.1, 0.64, 0.655, 1.234, 3.0):
        clip = noise(round(16_000 * seconds))
        whole, frames = model.predict(clip.unsqueeze(0), torch.tensor([len(clip)]))
        zeros = clip.new_zeros(model.tail_samples)
        streamed, state = feed(stream, torch.cat([clip, zeros]), stream.start())
        assert len(streamed) == frames[0] == state["Transformer_frames"][0]
        torch.testing.assert_close(streamed, whole[0, : len(streamed)], rtol=0.0, atol=1e-4)


@torch.inference_mode()
def test_sessions_of_any_age_continue_in_one_batch_and_from_saved_states() -> None:
    stream = streaming_of(make_model(declared(4, 6), kernel_size=5))
    shift, size = stream.chunk_shift_samples, stream.chunk_samples
    states, rests = [], []
    for chunks in (0, 1, 4):
        clip = noise(shift * (chunks + 1) + 3000, seed=chunks)
        states.append(feed(stream, clip, stream.start(), max_chunks=chunks)[1])
        rests.append(clip[shift * chunks :])
    saved = safetensors.torch.load(safetensors.torch.save(stack_states(states)))
    batch = torch.stack([audio[:size] for audio in rests]), torch.tensor([size] * 3)
    rows, frames, after = stream.forward_chunk(*batch, saved)
    sessions = zip(rows, frames, split_state(after), states, rests, strict=True)
    for row, count, row_state, state, audio in sessions:
        continued, _ = feed(stream, audio[shift:], row_state)
        expected, _ = feed(stream, audio, state)
        outputs = torch.cat([row[:count], continued])
        torch.testing.assert_close(outputs, expected, rtol=0.0, atol=1e-4)


def test_training_draws_chunk_sizes_and_sometimes_whole_clips() -> None:
    streaming = StreamingConfig.parse(declared(16, 64), frame_ms=40)
    torch.manual_seed(0)
    drawn = [streaming.draw().chunk_frames for _ in range(400)]
    chunks = [chunk for chunk in drawn if chunk is not None]
    assert {*chunks} == {*range(8, 33)} and 0.2 < 1 - len(chunks) / len(drawn) < 0.4
    torch.manual_seed(0)
    assert [streaming.draw().chunk_frames for _ in range(400)] == drawn
    x, lengths = torch.randn(2, 30, 16), torch.tensor([30, 11])
    sizes = {**SIZES, "kernel_size": 5, "dropout": 0.0}
    torch.manual_seed(0)
    plain = Transformer(**sizes)
    chunked = Transformer(**sizes, streaming=declared(4, 4))
    chunked.load_state_dict(plain.state_dict())
    expected, _ = plain(x, lengths)
    torch.manual_seed(0)
    is_whole = [torch.equal(chunked(x, lengths)[0], expected) for _ in range(20)]
    assert 0 < sum(is_whole) < 20


def test_invalid_streaming_options_are_refused() -> None:
    invalid: Sequence[dict[str, int]] = (
        declared(4, 8) | {"chunk_ms": 100},
        declared(0, 8),
        declared(4, 8) | {"lookahead_ms": 80},
        {"chunk_ms": 640},
    )
    for options in invalid:
        with pytest.raises(ConfigError, match="multiples of the 40 ms"):
            StreamingConfig.parse(options, frame_ms=40)
    with pytest.raises(ConfigError, match="in frames of 40 ms, but a frame of `CNN` has 80 ms"):
        require_frame_length(
            make_model(None, subsampling=8).encoder.modules["CNN"],
            make_model(declared(4, 8)).encoder.modules["Transformer"],
        )
    assert streaming_network(make_model(None, level="utterance")) is None

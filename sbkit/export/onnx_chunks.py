"""The chunk graph of a streaming model as ONNX: its state is among the inputs and outputs.

Legend: B sessions, S samples, U frames, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.export.onnx_graph import WRITERS, make_onnx
from sbkit.export.parity import Candidate, Texts
from sbkit.export.trace import EXAMPLE_BATCH, trace
from sbkit.models.streaming import StreamingNetwork, stack_states, streaming_network
from sbkit.runtime.onnx_model import ArrayState, BatchLogProbs, OnnxStreamingModel
from sbkit.runtime.torch_model import TorchModel


class ChunkModel(nn.Module):
    """Run one chunk: audio (B, S) between -1 and 1, (B,), state -> (B, U, V), (B,), state.

    The state consists of the tensors of the model's state, in their order.
    """

    def __init__(self, stream: StreamingNetwork, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts, self.stream = parts, stream  # parts own every parameter
        self.state_names = [*stream.start()]

    def forward(self, audio: Tensor, audio_lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        log_probs, frames, next_state = self.stream.forward_chunk(
            audio * FULL_SCALE,
            audio_lengths,
            dict(zip(self.state_names, state, strict=True)),
        )
        return log_probs, frames, *(next_state[name] for name in self.state_names)


def write_chunk_graph(
    model: TorchModel, folder: Path, metadata: Mapping[str, object], texts: Texts | None
) -> Iterator[Candidate]:
    """Write ``streaming.onnx``, and in int8 too if its errors can be counted in texts."""
    assert model.chunks is not None
    network = model.network
    stream = streaming_network(network)
    assert stream is not None
    state = stack_states([stream.start()] * EXAMPLE_BATCH)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(EXAMPLE_BATCH, stream.chunk_samples, generator=generator) / 10
    lengths = torch.tensor([stream.chunk_samples, stream.chunk_samples, stream.chunk_samples // 2])
    batch = {0: Dim.DYNAMIC}
    example = (noise, lengths, *state.values())
    shapes = (batch, batch, tuple(batch for _ in state))
    program = trace(ChunkModel(stream, network.model).eval(), *example, dynamic_shapes=shapes)
    outputs = ["log_probs", "frame_lengths", *(f"next_{name}" for name in state)]
    graph = make_onnx(program, ["audio", "audio_lengths", *state], outputs)
    metadata = {**metadata, **asdict(model.chunks)}
    tail = getattr(network, "tail_samples", 0)
    files = OnnxStreamingModel.files
    for precision in WRITERS if texts else ["fp32"]:
        WRITERS[precision](graph, folder / files[precision], metadata)
        onnx_model = OnnxStreamingModel((folder / files[precision]).read_bytes())
        yield Candidate(
            name=f"streaming, {precision}",
            files=(files[precision],),
            is_exact=precision == "fp32",
            run=partial(_run_in_chunks, onnx_model, tail),
            texts=texts,
            trained_texts=texts,
        )


def _run_in_chunks(
    stream: OnnxStreamingModel, tail: int, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Run whole clips and ``tail`` zeros chunk by chunk: (B, S), (B,) -> (B, U, V), (B,)."""
    audio = np.pad(audio, ((0, 0), (0, tail)))
    lengths = lengths + tail
    sizes = stream.chunks
    frames = np.zeros_like(lengths)
    log_probs: list[Float32s] = []
    state: ArrayState = {name: np.repeat(x, len(audio), 0) for name, x in stream.start().items()}
    for first in range(0, int(lengths.max()), sizes.step):
        remaining = (lengths - first).clip(0, sizes.window)
        chunk, state = stream.run_chunk(audio[:, first : first + sizes.window], remaining, state)
        log_probs.append(chunk.log_probs)
        frames += chunk.lengths
    return BatchLogProbs(np.concatenate(log_probs, 1), frames)

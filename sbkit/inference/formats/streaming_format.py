"""The chunk of a streaming model as ONNX, with its state as inputs and outputs.

Legend: B sessions, S samples of a chunk, U frames, V vocabulary.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sbkit.audio.io import FULL_SCALE
from sbkit.inference.formats.parity import Candidate
from sbkit.inference.formats.traced import EXAMPLE, trace
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs
from sbkit.inference.runtime.onnx_stream import OnnxStream, State
from sbkit.models.streaming import ChunkedModel, streaming_model


class ChunkModel(nn.Module):
    """A chunk as one module: audio (B, S) between -1 and 1, (B,), state -> (B, U, V), (B,), state.

    The state is the tensors of the model's ChunkState, in their order.
    """

    def __init__(self, stream: ChunkedModel, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts, self.stream = parts, stream  # the first owns every parameter
        self.kind: Any = type(stream.start())

    def forward(self, audio: Tensor, audio_lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Score every token at every frame."""
        log_probs, frames, after = self.stream.forward_chunk(
            audio * FULL_SCALE, audio_lengths, self.kind(*state)
        )
        return log_probs, frames, *vars(after).values()


def trace_chunk(model: Any) -> tuple[ExportedProgram, list[str]]:
    """Trace a chunk for any number of sessions; return also the names of its state's tensors.

    Raises SbkitError where it cannot be traced.
    """
    stream = streaming_model(model)
    assert stream is not None
    start: Any = stream.start()
    state = vars(type(start).stack([start] * EXAMPLE))
    noise = torch.randn(EXAMPLE, stream.window, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([stream.window, stream.window, stream.window // 2])
    rows = {0: Dim.DYNAMIC}
    program = trace(
        ChunkModel(stream, model.model).eval(),
        *(noise, lengths, *state.values()),
        free=(rows, rows, tuple(rows for _ in state)),
    )
    return program, [*state]


def chunk_candidate(folder: Path, precision: str) -> Candidate:
    """Return a written graph to be compared with the model, on whole clips."""
    file = OnnxStream.files[precision]
    stream = OnnxStream((folder / file).read_bytes())
    return Candidate(
        name=f"streaming, {precision}",
        files=(file,),
        is_exact=precision == "fp32",
        log_probs=partial(run_clips, stream),
    )


def run_clips(stream: OnnxStream, audio: Floats, lengths: Counts) -> LogProbs:
    """Run whole clips chunk by chunk: (B, S), (B,) -> (B, U, V), (B,)."""
    sizes, counts, found = stream.chunks, np.zeros_like(lengths), list[Floats]()
    state: State = {name: np.repeat(x, len(audio), 0) for name, x in stream.start().items()}
    for first in range(0, int(lengths.max()), sizes.step):
        rest = (lengths - first).clip(0, sizes.window)
        chunk, state = stream.step(audio[:, first : first + sizes.window], rest, state)
        found.append(chunk.log_probs)
        counts += chunk.lengths
    return LogProbs(np.concatenate(found, 1), counts)

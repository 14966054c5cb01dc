"""ONNX: waveforms in, log-probabilities out, in float32 and with matrices in int8.

The chunk of a streaming model as ONNX, with its state as inputs and outputs.

Legend: B sessions, S samples of a chunk, U frames, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.checksums import listed_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.imports import require_package
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.export.parity import Candidate
from sbkit.export.traced import EXAMPLE, TrainedModel, quietly, shortest, trace
from sbkit.models.streaming import StreamingNetwork, streaming_network
from sbkit.runtime.onnx_model import (
    MODEL_FILES,
    WEIGHTS_SHA256,
    BatchLogProbs,
    OnnxModel,
    OnnxStreamingModel,
    State,
)

OPSET = 18  # 17 gives an invalid model; every runtime of the last years has 18


def write_onnx(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write ``model.onnx`` and ``model.int8.onnx``, and those of chunks of a streaming model.

    A detector of voice activity has that of a chunk alone, of one frame: a GRU is unrolled.
    """
    bundle = trained.bundle
    metadata = {
        "sample_rate": bundle.config.sample_rate,
        "samples_per_frame": bundle.model.samples_per_frame,
        "blank": bundle.blank,
        WEIGHTS_SHA256: listed_checksums(folder.parent).get(WEIGHTS_FILE, ""),
    }
    chunks = list[Candidate]()
    if bundle.model.chunks is not None:
        chunks = _write_chunks(trained, folder, metadata | asdict(bundle.model.chunks))
    if bundle.labels is None:
        return chunks
    program = trained.program
    metadata["min_samples"] = shortest(program)
    model = make_onnx(program, ["audio", "audio_lengths"], ["log_probs", "frame_lengths"])
    save_onnx(model, folder / MODEL_FILES["fp32"], metadata)
    _quantize(model, folder / MODEL_FILES["int8"], metadata)
    return [
        Candidate(
            name=precision,
            files=(file,),
            is_exact=precision == "fp32",
            log_probs=OnnxModel((folder / file).read_bytes()).log_probs,
        )
        for precision, file in MODEL_FILES.items()
    ] + chunks


def _write_chunks(
    trained: TrainedModel, folder: Path, metadata: Mapping[str, Any]
) -> list[Candidate]:
    """Write one chunk of a streaming model, with its state, a recognizer's in both precisions."""
    program, state = trace_chunk(trained.bundle.model.network)
    outputs = ["log_probs", "frame_lengths", *(f"next_{name}" for name in state)]
    model = make_onnx(program, ["audio", "audio_lengths", *state], outputs)
    save_onnx(model, folder / OnnxStreamingModel.files["fp32"], metadata)
    if trained.bundle.labels is None:
        return [chunk_candidate(folder, "fp32")]
    _quantize(model, folder / OnnxStreamingModel.files["int8"], metadata)
    return [chunk_candidate(folder, precision) for precision in OnnxStreamingModel.files]


def make_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Translate a traced graph to ONNX, check it, and remove its traces of paths.

    Raises SbkitError when it cannot be translated.
    """
    onnx = require_package("onnx", extra="export")
    require_package("onnxscript", extra="export")
    try:
        with quietly():
            made = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                verbose=False,
            )
        assert made is not None
        model = made.model_proto
        _strip(model)
        onnx.checker.check_model(model)
    except Exception as error:  # the exporter and the checker have many of their own
        raise SbkitError(
            "A model must be made of operations that ONNX has, but its exporter raised "
            f"{type(error).__name__} ({str(error)[:300]}). Leave the format out, or change that "
            "part."
        ) from error
    return model


def save_onnx(model: Any, file: Path, metadata: Mapping[str, Any]) -> None:
    """Write a model with this metadata, and no other."""
    model.ClearField("metadata_props")
    text = {name: str(value) for name, value in metadata.items()}
    require_package("onnx", extra="export").helper.set_model_props(model, text)
    file.write_bytes(model.SerializeToString())


def _quantize(model: Any, file: Path, metadata: Mapping[str, Any]) -> None:
    """Write the weights of matrix products in int8, each column with its scale.

    Convolutions stay: onnxruntime's in int8 is slower. So do the mel filters and what is before
    them: a log-mel of 8 bits is none. But spectra in float64 are more exact than the rest here.
    """
    onnx = require_package("onnx", extra="export")
    quantization: Any = require_package("onnxruntime.quantization", extra="export")
    _narrow(model)
    with quietly():
        quantization.quantize_dynamic(
            model,
            file,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=sorted(_before_logarithm(model.graph)),
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
        )
    save_onnx(onnx.load(file), file, metadata)


def _narrow(model: Any) -> None:
    """Compute in float32 what is in float64: 1.15 times as fast in all (`Fbank` says where)."""
    onnx = require_package("onnx", extra="export")
    double, single = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT
    attributes = [each for node in model.graph.node for each in node.attribute]
    tensors = [each.t for each in attributes if each.HasField("t")]
    for tensor in [*model.graph.initializer, *tensors]:
        if tensor.data_type == double:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for each in attributes:
        if each.name == "to" and each.i == double:  # of Cast
            each.i = single


def _before_logarithm(graph: Any) -> set[str]:
    """Name the nodes that a logarithm depends on: those of the features."""
    made_by = {name: node for node in graph.node for name in node.output}
    waiting = [node for node in graph.node if node.op_type == "Log"]
    found: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node.name not in found:
            found.add(node.name)
            waiting += [made_by[name] for name in node.input if name in made_by]
    return found


def _strip(model: Any) -> None:
    """Remove what the exporter wrote for its makers: stack traces, which name folders."""
    graph = model.graph
    for each in [model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer]:
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    graph.ClearField("value_info")
    for function in model.functions:
        for each in [function, *function.node]:
            each.ClearField("metadata_props")
            each.ClearField("doc_string")


class ChunkModel(nn.Module):
    """A chunk as one module: audio (B, S) between -1 and 1, (B,), state -> (B, U, V), (B,), state.

    The state is the tensors of the model's StreamingState, in their order.
    """

    def __init__(self, stream: StreamingNetwork, parts: nn.ModuleList) -> None:
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
    stream = streaming_network(model)
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
    file = OnnxStreamingModel.files[precision]
    stream = OnnxStreamingModel((folder / file).read_bytes())
    return Candidate(
        name=f"streaming, {precision}",
        files=(file,),
        is_exact=precision == "fp32",
        log_probs=partial(run_clips, stream),
    )


def run_clips(stream: OnnxStreamingModel, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Run whole clips chunk by chunk: (B, S), (B,) -> (B, U, V), (B,)."""
    sizes, counts, found = stream.chunks, np.zeros_like(lengths), list[Float32s]()
    state: State = {name: np.repeat(x, len(audio), 0) for name, x in stream.start().items()}
    for first in range(0, int(lengths.max()), sizes.step):
        rest = (lengths - first).clip(0, sizes.window)
        chunk, state = stream.step(audio[:, first : first + sizes.window], rest, state)
        found.append(chunk.log_probs)
        counts += chunk.lengths
    return BatchLogProbs(np.concatenate(found, 1), counts)

"""ONNX: recognizers, the chunk of a streaming model, and the graphs of other tasks.

Legend: B utterances or sessions, S samples, U frames, V vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.bundle.task import Graph
from sbkit.export.parity import (
    PARITY_TEXT,
    Candidate,
    greedy_texts,
    noise_case,
    pad_frames,
)
from sbkit.export.trace import (
    EXAMPLE_BATCH,
    EncodingModel,
    NetworkModule,
    WaveformModel,
    as_tuple,
    trace,
)
from sbkit.models.pretrained.whisper import DecoderState, Memory
from sbkit.models.streaming import StreamingNetwork, streaming_network
from sbkit.runtime.onnx_model import (
    MIN_ONNXRUNTIME,
    MODEL_FILES,
    SETTINGS_JSON,
    WEIGHTS_SHA256,
    ArrayState,
    BatchLogProbs,
    OnnxModel,
    OnnxStreamingModel,
)
from sbkit.runtime.onnx_whisper import OnnxDecoder
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer

OPSET = 18  # 17 gives an invalid model

Proto = Any  # a message of the package onnx, which makes its classes at run time

# ---- recognizers and voice activity detectors


def write_onnx(bundle: Bundle[TorchModel], folder: Path) -> Sequence[Candidate]:
    """Write ``model.onnx`` and ``model.int8.onnx``, and the chunk graph of a streaming model.

    A voice activity detector has only a chunk graph, for one frame: the exporter unrolls its GRU.
    A task with graphs has a file for each of them instead.
    """
    if bundle.task.graphs:
        return [*_write_graphs(bundle, folder)]
    rate = bundle.config.sample_rate
    metadata = {
        "sample_rate": rate,
        "samples_per_frame": bundle.model.samples_per_frame,
        WEIGHTS_SHA256: read_checksums(folder.parent).get(WEIGHTS_FILE, ""),
    }
    candidates: list[Candidate] = []
    if bundle.labels is not None:
        recognizer = as_recognizer(bundle)
        has_decoder = recognizer.decoder_tokenizer is not None
        program = trace_recognizer(bundle, EncodingModel if has_decoder else WaveformModel)
        metadata |= {
            "blank": recognizer.blank,
            "tokens": write_tokens(recognizer, folder).name,
        }
        outputs = ["log_probs", "frame_lengths", *(["states"] if has_decoder else [])]
        model = make_onnx(program, ["audio", "audio_lengths"], outputs)
        for precision, file in MODEL_FILES.items():
            WRITERS[precision](model, folder / file, metadata)
            run = OnnxModel((folder / file).read_bytes()).log_probs
            is_exact = precision == "fp32"
            candidates.append(Candidate(name=precision, files=(file,), is_exact=is_exact, run=run))
        if has_decoder:
            candidates += _write_decoder(recognizer, folder, metadata)
    if bundle.model.chunks is not None:
        candidates += _write_chunk_graph(bundle, folder, metadata | asdict(bundle.model.chunks))
    return candidates


def trace_recognizer(
    bundle: Bundle[TorchModel], model_class: type[NetworkModule] = WaveformModel
) -> ExportedProgram:
    """Trace a recognizer; raise BundleError for one that does not take any size."""
    rate = bundle.config.sample_rate
    noise = torch.randn(EXAMPLE_BATCH, rate, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([rate, rate * 3 // 4, rate // 2])
    return trace(model_class(bundle.model.network).eval(), noise, lengths)


def write_tokens(bundle: AsrBundle[TorchModel], folder: Path) -> Path:
    """Write the names of a recognizer's tokens, as sherpa-onnx reads them, and return the file."""
    file = folder / "tokens.txt"
    names = dict(enumerate(bundle.tokenizer.pieces())) | {bundle.blank: "<blk>"}
    file.write_text("".join(f"{name} {id}\n" for id, name in names.items()), encoding="utf-8")
    return file


def make_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Proto:
    """Translate a traced graph to ONNX, check it, and remove the names of local folders."""
    onnx = require_package("onnx", extra="export")
    require_package("onnxscript", extra="export")
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    try:
        onnx_program = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, verbose=False, **names
        )
        assert onnx_program is not None
        model = onnx_program.model_proto
        _strip(model)
        onnx.checker.check_model(model)
    except Exception as error:  # the exporter and the checker have many exceptions of their own
        raise BundleError(
            f"This model cannot be written as ONNX: the exporter raised {type(error).__name__} "
            f"({str(error)[:300]})."
        ) from error
    return model


def save_onnx(model: Proto, file: Path, metadata: Mapping[str, object]) -> None:
    """Write a model for onnxruntime from MIN_ONNXRUNTIME on, with only this metadata."""
    helper = require_package("onnx", extra="export").helper
    # By ONNX's table of versions (docs/Versioning.md), opset 18 came with IR version 8.
    model.ir_version = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model.ClearField("metadata_props")
    facts = {**metadata, "min_onnxruntime": MIN_ONNXRUNTIME}
    helper.set_model_props(model, {name: str(value) for name, value in facts.items()})
    file.write_bytes(model.SerializeToString())


def _quantize(model: Proto, file: Path, metadata: Mapping[str, object]) -> None:
    """Write the weights of matrix products in int8, each column with its scale.

    Convolutions stay in float32, because onnxruntime is slower with int8 convolutions. The mel
    filters and the operations before them stay in float32, too: 8 bits are too few for a log-mel.
    They do not need float64: what it gains in the spectra is less than what int8 loses elsewhere.
    """
    onnx = require_package("onnx", extra="export")
    quantization: Any = require_package("onnxruntime.quantization", extra="export")
    _to_float32(model)
    quantization.quantize_dynamic(
        model,
        file,
        op_types_to_quantize=["MatMul"],
        nodes_to_exclude=sorted(_before_logarithm(model.graph)),
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )
    save_onnx(onnx.load(file), file, metadata)


WRITERS = {"fp32": save_onnx, "int8": _quantize}  # called in this order: int8 changes the graph


def _to_float32(model: Proto) -> None:
    """Replace float64 by float32: 1.1 times as fast overall (`Fbank` says what uses float64)."""
    onnx = require_package("onnx", extra="export")
    double, single = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    constants = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in [*model.graph.initializer, *constants]:
        if tensor.data_type == double:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for attribute in attributes:
        if attribute.name == "to" and attribute.i == double:  # the type of a Cast
            attribute.i = single


def _before_logarithm(graph: Proto) -> set[str]:
    """Return the names of the nodes that a logarithm depends on: they compute the features."""
    node_of_output = {name: node for node in graph.node for name in node.output}
    pending = [node for node in graph.node if node.op_type == "Log"]
    names: set[str] = set()
    while pending:
        node = pending.pop()
        if node.name not in names:
            names.add(node.name)
            pending += [node_of_output[name] for name in node.input if name in node_of_output]
    return names


def _strip(model: Proto) -> None:
    """Remove the exporter's debugging notes, whose stack traces name local folders."""
    graph = model.graph
    graph.ClearField("value_info")
    protos = [model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer]
    for function in model.functions:
        protos += [function, *function.node]
    for proto in protos:
        proto.ClearField("metadata_props")
        proto.ClearField("doc_string")


# ---- the chunk graph of a streaming model: its state is among the inputs and outputs


class ChunkModel(nn.Module):
    """Run one chunk: audio (B, S) between -1 and 1, (B,), state -> (B, U, V), (B,), state.

    The state consists of the tensors of the model's NetworkState, in their order.
    """

    def __init__(self, stream: StreamingNetwork, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts, self.stream = parts, stream  # parts own every parameter
        self.state_class: Any = type(stream.start())

    def forward(self, audio: Tensor, audio_lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        log_probs, frames, next_state = self.stream.forward_chunk(
            audio * FULL_SCALE, audio_lengths, self.state_class(*state)
        )
        return log_probs, frames, *vars(next_state).values()


def _write_chunk_graph(
    bundle: Bundle[TorchModel], folder: Path, metadata: Mapping[str, object]
) -> Iterator[Candidate]:
    network = bundle.model.network
    stream = streaming_network(network)
    assert stream is not None
    start: Any = stream.start()
    state = vars(type(start).stack([start] * EXAMPLE_BATCH))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(EXAMPLE_BATCH, stream.chunk_samples, generator=generator) / 10
    lengths = torch.tensor([stream.chunk_samples, stream.chunk_samples, stream.chunk_samples // 2])
    batch = {0: Dim.DYNAMIC}
    example = (noise, lengths, *state.values())
    shapes = (batch, batch, tuple(batch for _ in state))
    program = trace(ChunkModel(stream, network.model).eval(), *example, dynamic_shapes=shapes)
    outputs = ["log_probs", "frame_lengths", *(f"next_{name}" for name in state)]
    model = make_onnx(program, ["audio", "audio_lengths", *state], outputs)
    tail = getattr(network, "tail_samples", 0)
    files = OnnxStreamingModel.files
    for precision in WRITERS if bundle.labels is not None else ["fp32"]:
        WRITERS[precision](model, folder / files[precision], metadata)
        onnx_model = OnnxStreamingModel((folder / files[precision]).read_bytes())
        yield Candidate(
            name=f"streaming, {precision}",
            files=(files[precision],),
            is_exact=precision == "fp32",
            run=partial(_run_in_chunks, onnx_model, tail),
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


# ---- the graphs of a Whisper's decoder: its state is among the inputs and outputs


class DecoderFrames(NetworkModule):
    """Compute the decoder's memories of frames: (B, U, D) -> 2 x (layers, B, H, U, D/H)."""

    def forward(self, states: Tensor) -> tuple[Tensor, ...]:
        layers = self.network.encoder.backbone.module.decoder.layers
        return _stacked([layer.encoder_attn.remember(states) for layer in layers])


class DecoderTokens(NetworkModule):
    """Decode tokens (B, L) of clips without padding: memories -> (B, L, V), token memories."""

    def forward(self, tokens: Tensor, *memories: Tensor) -> tuple[Tensor, ...]:
        keys, values, *token_memories = memories
        frame_state, token_state = (
            tuple(map(Memory, *map(torch.unbind, pair)))
            for pair in ((keys, values), token_memories)
        )
        visible = torch.ones(1, 1, 1, keys.shape[3], dtype=torch.bool)
        decoder: Any = self.network.encoder.backbone.module.decoder
        decoded, state = decoder(tokens, DecoderState(visible, frame_state, token_state))
        return self.network.seq_lin(decoded), *_stacked(state.tokens)


def _stacked(memories: Sequence[Memory]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(tensors) for tensors in zip(*memories, strict=True))


def _write_decoder(
    bundle: AsrBundle[TorchModel], folder: Path, metadata: Mapping[str, object]
) -> Iterator[Candidate]:
    network = bundle.model.network
    metadata = {**metadata, SETTINGS_JSON: json.dumps(asdict(network.generation))}
    tokens = torch.zeros(EXAMPLE_BATCH, 4, dtype=torch.int64)
    width = network.encoder.backbone.module.decoder.embed_tokens.embedding_dim
    states = torch.zeros(EXAMPLE_BATCH, 9, width)
    frames = DecoderFrames(network).eval()
    memories = frames(states)
    example = (tokens, *memories, *(memory[:, :, :, :5] for memory in memories))
    memory_shape = {1: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, (memory_shape,) * 4)
    frame_names = ["frame_keys", "frame_values"]
    token_names = ["token_keys", "token_values"]
    program = trace(DecoderTokens(network).eval(), *example, dynamic_shapes=shapes)
    outputs = ["logits", *(f"next_{name}" for name in token_names)]
    graphs = [
        make_onnx(trace(frames, states), ["states"], frame_names),
        make_onnx(program, ["tokens", *frame_names, *token_names], outputs),
    ]
    assert bundle.decoder_tokenizer is not None
    text = bundle.decoder_tokenizer.encode(PARITY_TEXT)
    for precision, files in OnnxDecoder.files.items():
        for file, graph in zip(files, graphs, strict=True):
            WRITERS[precision](graph, folder / file, metadata)
        model = OnnxModel((folder / MODEL_FILES[precision]).read_bytes())
        decoder = OnnxDecoder(*(OnnxModel((folder / file).read_bytes()) for file in files))
        model.decoder = decoder
        yield Candidate(
            name=f"decoder, {precision}",
            files=files,
            is_exact=precision == "fp32",
            run=partial(_decoder_log_probs, model, decoder, text),
            run_trained=partial(_trained_decoder_log_probs, network, text),
            transcribe=partial(greedy_texts, bundle.with_model(model)),
            transcribe_trained=partial(greedy_texts, bundle),
        )


def _decoder_log_probs(
    model: OnnxModel, decoder: OnnxDecoder, text: Sequence[int], audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Compute log-probabilities of a text's tokens in every clip: -> (B, L + 1, V), (B,)."""
    _, frames, states = model.run(audio, lengths)
    clips = (clip[:count] for clip, count in zip(states, frames, strict=True))
    return pad_frames([decoder.log_probs(text, decoder.remember(clip)) for clip in clips])


@torch.inference_mode()
def _trained_decoder_log_probs(
    network: Any, text: Sequence[int], audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Compute the same log-probabilities with the trained model."""
    states, frames = network.encode(FULL_SCALE * torch.from_numpy(audio), torch.from_numpy(lengths))
    tokens = torch.tensor([[*text]]).expand(len(audio), -1)
    return pad_frames([*network.decoder_log_probs(tokens, states, frames).numpy()])


# ---- the graphs of tasks other than recognition, such as a codec


class MethodModule(NetworkModule):
    """A method of a task's model as a module."""

    def __init__(self, network: Any, name: str) -> None:
        super().__init__(network)
        self.method = getattr(network, name)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.method(*inputs))


def trace_graphs(bundle: Bundle[TorchModel]) -> Iterator[tuple[str, ExportedProgram]]:
    """Trace each graph of a task; raise BundleError for one that does not take any size."""
    model = bundle.model
    case = noise_case(EXAMPLE_BATCH, 1.0, bundle.config.sample_rate)
    for name, graph in bundle.task.graphs.items():
        example = graph.arguments(model.run, case.audio, case.lengths)
        dynamic = tuple(  # the first two dimensions, except where they have size 1
            {dim: Dim.DYNAMIC for dim, size in enumerate(array.shape[:2]) if size > 1}
            for array in example
        )
        program = trace(
            MethodModule(model.network, name).eval(),
            *map(torch.from_numpy, example),
            dynamic_shapes=(dynamic,),  # one entry for `*inputs`
        )
        yield name, program


def _write_graphs(bundle: Bundle[TorchModel], folder: Path) -> Iterator[Candidate]:
    model = bundle.model
    rate = bundle.config.sample_rate
    weights = read_checksums(folder.parent).get(WEIGHTS_FILE, "")
    settings = json.dumps(model.settings)
    metadata = {"sample_rate": rate, WEIGHTS_SHA256: weights, SETTINGS_JSON: settings}
    for name, program in trace_graphs(bundle):
        graph = bundle.task.graphs[name]
        file = folder / f"{name}.onnx"
        onnx_model = make_onnx(program, graph.inputs, graph.outputs)
        save_onnx(onnx_model, file, metadata)
        written = OnnxModel(file.read_bytes())
        yield Candidate(
            name=name,
            files=(file.name,),
            run=partial(_run_graph, graph, model, written.run),
            run_trained=partial(_run_graph, graph, model, partial(model.run, name)),
        )


def _run_graph(
    graph: Graph,
    model: TorchModel,
    run: Callable[..., Sequence[Array]],
    audio: Float32s,
    lengths: Counts,
) -> Sequence[Array]:
    return run(*graph.arguments(model.run, audio, lengths))

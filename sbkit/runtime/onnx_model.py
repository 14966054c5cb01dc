"""The ONNX models of a bundle, run by onnxruntime without torch.

A graph that does not run as requested is refused. onnxruntime falls back to the CPU with only a
warning, so the provider of each node, the index of the GPU and the precision of the nodes are read
back. Only this file and `SileroModel` call onnxruntime; tested with version 1.31.1.

Legend: B clips or sessions, S samples, U frames, V labels, D width, N texts, L labels of a text.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.base.arrays import Array, Counts, Float32s, Float64s, Int64s, LogProbs
from sbkit.base.checksums import CHECKSUMS, check_unchanged
from sbkit.base.errors import BundleError, ConfigError, DeviceError
from sbkit.base.files import parsing_errors, read_regular
from sbkit.base.imports import require_package
from sbkit.base.machine import PROVIDERS, usable_cores
from sbkit.bundle.protocols import (
    AttentionDecoder,
    ChunkSizes,
    DeviceArray,
    EffectiveRuntime,
    Encoded,
    StreamingModel,
)
from sbkit.bundle.side_inputs import SideInputs
from sbkit.runtime.batch_shapes import pad_clips, round_up
from sbkit.runtime.model_thread import ClipsAndSides, run_batches

ONNX_FOLDER = "onnx"  # in a bundle
# The oldest version that runs the graphs: it is in sherpa-onnx's library for Android. sbkit itself
# needs a newer version.
MIN_ONNXRUNTIME = "1.17.1"
MODEL_FILES = {"fp32": "model.onnx", "int8": "model.int8.onnx"}  # by precision
WEIGHTS_SHA256 = "weights"  # metadata key of the checksum of the bundle's weights
SETTINGS_JSON = "settings"  # metadata key of the data for callers of a task's graphs
MAX_ONNX_BYTES = 1 << 31  # the limit of a protobuf
MAX_SAMPLES = 1 << 20  # the longest chunk or padding; a minute at 16 kHz
DEVICE_PATTERN = re.compile("(cpu(?!:)|cuda)(?::(0|[1-9][0-9]?))?")
GPU_INDEX = "device_id"  # an option of the provider
HEAVY_OPERATIONS = ("MatMul", "Gemm", "Conv", "Attention")  # or names that contain one of these
INTEGER_OPERATIONS = ("MatMulInteger", "ConvInteger")  # in int8 models
RECORD_PROVIDERS = "session.record_ep_graph_assignment_info"
NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}

ArrayState = Mapping[str, Array]  # (B, ...) each


class BatchLogProbs(NamedTuple):
    """log_probs (B, U, V), meaningless past each clip's length; lengths (B,) in frames."""

    log_probs: Float32s
    lengths: Counts


class OnnxModel:
    """A `ClipModel`: an onnxruntime session that takes whole clips.

    metadata: of the file, such as sample_rate, samples_per_frame and weights.
    padded_lengths: the samples that clips are padded to, by default the length of the longest clip.
    files: the name of the file in ``onnx/`` of a bundle, by precision.
    chunk_model: the streaming model, if it was loaded, too.
    decoder: an attention decoder that generates texts, if the model has one.
    """

    files: ClassVar = MODEL_FILES
    padded_lengths: Sequence[int] = ()
    chunk_model: "OnnxStreamingModel | None" = None
    decoder: AttentionDecoder | None = None

    def __init__(self, content: bytes, *, device: str = "cpu") -> None:
        """Load the bytes of a file with onnxruntime, on cpu, cuda (the first GPU) or cuda:N."""
        onnxruntime = require_package("onnxruntime", extra="export")
        if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
            raise DeviceError(
                f"onnxruntime {onnxruntime.__version__} cannot say where a graph runs. Upgrade it."
            )
        provider, provider_options = _parse_device(device)
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry(RECORD_PROVIDERS, "1")
        options.intra_op_num_threads = 1  # callers have a thread for each batch
        options.log_severity_level = 4  # errors are raised; they need not be printed
        if provider == PROVIDERS["cuda"]:
            with redirect_stdout(sys.stderr):
                onnxruntime.preload_dlls()  # finds the CUDA wheels, as torch does by itself
        try:
            self._session = onnxruntime.InferenceSession(
                content,
                options,
                providers=[(provider, provider_options)],
                enable_fallback=0,  # not even after errors
            )
        except Exception as error:  # onnxruntime has an exception for each of its error codes
            raise BundleError(
                f"onnxruntime cannot load a model: {type(error).__name__} ({str(error)[:200]})."
            ) from error
        self.runs_on = _read_back(self._session, provider)
        self.metadata = dict(self._session.get_modelmeta().custom_metadata_map)

    @classmethod
    def load(cls, bundle: Path, *, device: str = "cpu", precision: str = "fp32") -> Self:
        """Load the model from ``onnx/`` of a bundle."""
        return cls(read_graph(bundle, cls.files[precision]), device=device)

    def log_probs(self, audio: Array, lengths: Array) -> BatchLogProbs:
        """Compute log-probabilities of audio between -1 and 1: (B, S), (B,) -> (B, U, V), (B,)."""
        return BatchLogProbs(*self.run(audio.astype(np.float32), lengths.astype(np.int64))[:2])

    def run(self, *arrays: Array) -> list[Array]:
        """Run the graph on its inputs in order, and return its outputs in order."""
        names = (node.name for node in self._session.get_inputs())
        outputs: list[Array] = self._session.run(None, dict(zip(names, arrays, strict=True)))
        return outputs

    @property
    def samples_per_frame(self) -> int:
        return self.read_samples("samples_per_frame")

    @property
    def has_decoder(self) -> bool:
        """Whether the graph returns states, which an attention decoder of the bundle reads."""
        return "states" in {node.name for node in self._session.get_outputs()}

    def read_samples(self, name: str) -> int:
        """Return a number of samples from the metadata; raises BundleError if it is not valid."""
        text = self.metadata.get(name, "nothing")
        if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MAX_SAMPLES):
            raise BundleError(
                f"`{name}` in an ONNX model must be from 1 to {MAX_SAMPLES}, but is {text[:20]}."
            )
        return int(text)

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        assert not sides  # `load_bundle` refuses such a bundle
        samples = round_up(max(map(len, clips)), self.padded_lengths)
        audio, lengths = pad_clips(clips, samples)
        log_probs, frames, *states = self.run(audio / np.float32(FULL_SCALE), lengths)
        return [
            Encoded(log_probs[row, :count], states[0][row, :count] if states else None)
            for row, count in enumerate(frames.tolist())
        ]

    def predict(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[LogProbs]:
        return [encoded.log_probs for encoded in self.encode(clips, sides)]

    def encode_batches(self, batches: Sequence[ClipsAndSides]) -> list[list[Encoded]]:
        """Run the encoder on batches of clips; on the CPU, in parallel threads."""
        threads = usable_cores() if self.runs_on.device == "cpu" else 1
        return run_batches(self.encode, batches, threads=threads)

    def score_texts(self, states: DeviceArray, texts: Int64s) -> Float64s:
        return self._require_decoder().score_texts(states, texts)

    def generate(self, states: DeviceArray) -> list[int]:
        return self._require_decoder().generate(states)

    def _require_decoder(self) -> AttentionDecoder:
        if self.decoder is None:
            raise DeviceError(
                "The attention decoder is not exported to ONNX. Use the runtime torch."
            )
        return self.decoder

    @property
    def streaming(self) -> StreamingModel | None:
        return self.chunk_model


class OnnxStreamingModel(OnnxModel):
    """A `StreamingModel`: a graph that takes one chunk, and the state as arrays."""

    files: ClassVar = {"fp32": "streaming.onnx", "int8": "streaming.int8.onnx"}

    @property
    def streaming(self) -> StreamingModel:
        return self

    @property
    def chunks(self) -> ChunkSizes:
        return ChunkSizes(*(self.read_samples(size.name) for size in fields(ChunkSizes)))

    def start(self) -> ArrayState:
        _, _, *states = self._session.get_inputs()
        return {
            state.name: np.zeros((1, *state.shape[1:]), NUMPY_TYPES[state.type]) for state in states
        }

    def run_chunk(
        self, audio: Float32s, lengths: Counts, state: ArrayState
    ) -> tuple[BatchLogProbs, ArrayState]:
        """Run a chunk of audio between -1 and 1: (B, S), (B,), state -> (B, U, V), (B,), state."""
        padded = np.pad(audio, ((0, 0), (0, self.chunks.window - audio.shape[1])))
        inputs = {"audio": padded, "audio_lengths": lengths, **state}
        log_probs, frames, *after = self._session.run(None, inputs)
        return BatchLogProbs(log_probs, frames), dict(zip(state, after, strict=True))

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ArrayState]
    ) -> list[tuple[LogProbs, ArrayState]]:
        audio, lengths = pad_clips(chunks, self.chunks.window)
        state = {name: np.concatenate([row[name] for row in states]) for name in states[0]}
        (log_probs, frames), after = self.run_chunk(audio / np.float32(FULL_SCALE), lengths, state)
        return [
            (log_probs[row, :count], {name: array[row : row + 1] for name, array in after.items()})
            for row, count in enumerate(frames.tolist())
        ]


class OnnxGraphs:
    """The graphs of a task, each in an onnxruntime session.

    runs_on: where the nodes of all graphs run.
    metadata: of the first graph.
    settings: the plain data that callers of the graphs need.
    """

    def __init__(self, graphs: Iterable[str], bundle: Path, *, device: str) -> None:
        """Load graphs of a bundle."""
        contents = {name: read_graph(bundle, f"{name}.onnx") for name in graphs}
        self._models = {name: OnnxModel(contents[name], device=device) for name in contents}
        first = next(iter(self._models.values()))
        all_nodes = (Counter(model.runs_on.nodes) for model in self._models.values())
        nodes = sum(all_nodes, Counter[str]())
        self.runs_on = replace(first.runs_on, nodes=dict(nodes))
        self.metadata = first.metadata
        with parsing_errors("An ONNX model", "hold its settings", fix="Export it again."):
            self.settings: dict[str, Any] = json.loads(first.metadata[SETTINGS_JSON])

    def run(self, graph: str, *arrays: Array) -> list[Array]:
        """Run a graph by its name, and return its outputs."""
        return self._models[graph].run(*arrays)


def read_graph(bundle: Path, name: str) -> bytes:
    """Read a file in ``onnx/`` of a bundle, and return the bytes that match its checksum."""
    folder = bundle / ONNX_FOLDER
    if not (folder / name).exists():
        raise BundleError(
            f"{bundle} has no {ONNX_FOLDER}/{name}. Export the run again: sbkit export RUN --out "
            "DIR --formats onnx"
        )
    content = read_regular(folder / name, max_bytes=MAX_ONNX_BYTES, subject="An ONNX model")
    sums = read_regular(folder / CHECKSUMS, subject="A list of checksums")
    check_unchanged({name: content}, sums, folder=folder)
    return content


def _parse_device(device: str) -> tuple[str, dict[str, str]]:
    """Return the provider of a device and its options: the index of a GPU, without TF32."""
    match = DEVICE_PATTERN.fullmatch(device)
    if match is None:
        raise ConfigError(f"The device of onnx must be auto, cpu, cuda or cuda:N, but is {device}.")
    options = {} if device == "cpu" else {GPU_INDEX: match[2] or "0", "use_tf32": "0"}
    return PROVIDERS[match[1]], options


def _read_back(session: Any, provider: str) -> EffectiveRuntime:
    """Return where and how a session computes its matrix products and convolutions."""
    subgraphs = session.get_provider_graph_assignment_info()
    nodes = [(graph.ep_name, node.op_type) for graph in subgraphs for node in graph.get_nodes()]
    heavy = [(name, op) for name, op in nodes if any(part in op for part in HEAVY_OPERATIONS)]
    elsewhere = Counter(name for name, _ in heavy if name != provider)
    if elsewhere or not heavy:
        counts = ", ".join(f"{count} by {name}" for name, count in elsewhere.items())
        raise DeviceError(
            f"{provider} must run all {len(heavy)} matrix products and convolutions of the model, "
            f"but runs {len(heavy) - elsewhere.total()} ({counts or 'nothing was placed'})."
        )
    index = session.get_provider_options().get(provider, {}).get(GPU_INDEX)
    # Products of two activations are not quantized, so an int8 model also has fp32.
    precisions = {"int8" if op in INTEGER_OPERATIONS else "fp32" for _, op in heavy}
    return EffectiveRuntime(
        runtime="onnx",
        device=f"cuda:{index}" if provider == PROVIDERS["cuda"] else "cpu",
        precision=" and ".join(sorted(precisions, reverse=True)),
        nodes=dict(Counter(name for name, _ in nodes)),  # `asdict` cannot copy a Counter
    )

"""Run the ONNX model of a bundle without torch: waveforms in, log-probabilities out.

Legend: B utterances, S samples, U frames, V vocabulary.

The session runs as asked, or is refused: the provider of each node is read back, because
onnxruntime falls back to the CPU with a warning at most; and so are the number of the GPU and the
precision of the nodes.

A streaming model by onnxruntime, chunk by chunk: its state goes in and comes out as arrays.

Legend: B sessions, S samples, U frames, V vocabulary.
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
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.base.checksums import CHECKSUMS, check_unchanged
from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading
from sbkit.base.machine import usable_cores
from sbkit.base.process import require_package
from sbkit.bundle.protocols import ChunkSizes, Effective, Encoded
from sbkit.runtime.model import Batch, run_batches
from sbkit.runtime.shapes import padded_length

FOLDER = "onnx"  # of a bundle
MADE_OF = "weights"  # in the metadata: the SHA-256 of the bundle's
SETTINGS = "settings"  # likewise: JSON, of a task's graphs
FILES = {"fp32": "model.onnx", "int8": "model.int8.onnx"}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DEVICE = re.compile("(cpu(?!:)|cuda)(?::(0|[1-9][0-9]?))?")
NUMBER = "device_id"  # the provider's option for the GPU
HEAVY = ("MatMul", "Gemm", "Conv", "Attention")  # in names, fused ones too: nearly all arithmetic
WHOLE = ("MatMulInteger", "ConvInteger")  # what int8 computes with
LARGEST = 1 << 31  # bytes, of a protobuf
MAX_SAMPLES = 1 << 20  # of a chunk or of padding; clips of a minute at 16 kHz
RECORD = "session.record_ep_graph_assignment_info"

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


class LogProbs(NamedTuple):
    """log_probs (B, U, V) in float32; lengths (B,) in frames, past which they mean nothing."""

    log_probs: Floats
    lengths: Counts


class OnnxModel:
    """A session, with the interface of `TorchModel`.

    Attributes:
        effective: where its nodes run, and in which precision.
        metadata: of the file: sample_rate, min_samples, samples_per_frame, blank, weights.
        lengths: samples that batches are padded to; none: to their longest clip.
        files: its name in ``onnx/`` of a bundle, by precision.
        stream: the session of a chunk, where one was loaded beside this of whole clips.
    """

    files: ClassVar = FILES
    lengths: Sequence[int] = ()
    stream: "OnnxModel | None" = None

    def __init__(self, content: bytes, *, device: str = "cpu") -> None:
        """Make a session of a file's bytes, on cpu, cuda (the first GPU) or cuda:N.

        Raises SbkitError where onnxruntime or the device is not there, or does not run the model.
        """
        runtime = require_package("onnxruntime", extra="export")
        provider, which = _parse_device(device)
        options = runtime.SessionOptions()
        options.add_session_config_entry(RECORD, "1")
        options.intra_op_num_threads = 1  # callers have a thread for each batch
        options.log_severity_level = 4  # errors are raised, not printed too
        if provider == PROVIDERS["cuda"]:
            with redirect_stdout(sys.stderr):
                runtime.preload_dlls()  # of CUDA's wheels, which by itself only torch finds
        try:
            self._session = runtime.InferenceSession(
                content,
                options,
                providers=[(provider, which)],
                enable_fallback=0,  # after errors, too
            )
        except Exception as error:  # onnxruntime has an exception for each of its error codes
            raise SbkitError(
                "An ONNX model must be one that onnxruntime loads, but it raised "
                f"{type(error).__name__} ({str(error)[:200]}). Export it again."
            ) from error
        self.effective = _read_back(self._session, provider)
        self.metadata = dict(self._session.get_modelmeta().custom_metadata_map)
        self._min_samples = (
            self.read_samples("min_samples") if "min_samples" in self.metadata else 0
        )

    @classmethod
    def load(cls, bundle: Path, *, device: str = "cpu", precision: str = "fp32") -> Self:
        """Load ``onnx/`` of a bundle, as `read_graph` does; raises SbkitError."""
        return cls(read_graph(bundle, cls.files[precision]), device=device)

    def log_probs(self, audio: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> LogProbs:
        """Compute log-probabilities: (B, S), (B,) -> (B, U, V), (B,).

        ``audio`` is int16, or floating point between -1 and 1; zero past each length.
        """
        scale = FULL_SCALE if audio.dtype == np.int16 else 1
        missing = self._min_samples - audio.shape[1]
        padded = np.pad(audio, ((0, 0), (0, missing))) if missing > 0 else audio
        inputs = (padded.astype(np.float32) / np.float32(scale), lengths.astype(np.int64))
        return LogProbs(*self.run(*inputs))

    def run(self, *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Compute the outputs of the graph from its inputs, in their order."""
        names = (each.name for each in self._session.get_inputs())
        found: list[npt.NDArray[Any]] = self._session.run(
            None, dict(zip(names, arrays, strict=True))
        )
        return found

    @property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        return self.read_samples("samples_per_frame")

    def read_samples(self, name: str) -> int:
        """Return a number of samples from the metadata; raises SbkitError where it is none."""
        text = self.metadata.get(name, "nothing")
        if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MAX_SAMPLES):
            raise SbkitError(
                f"The metadata of an ONNX model must say `{name}`, from 1 to {MAX_SAMPLES} "
                f"samples, but says {text[:20]}. Export it again."
            )
        return int(text)

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        lengths = np.array([len(clip) for clip in clips])
        longest = padded_length(int(lengths.max()), self.lengths)
        audio = np.zeros((len(clips), longest), np.int16)
        for row, clip in zip(audio, clips, strict=True):
            row[: len(clip)] = clip
        found = self.log_probs(audio, lengths)
        rows = zip(found.log_probs, found.lengths, strict=True)
        return [Encoded(row[:count]) for row, count in rows]

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on several batches; on the CPU at once, each in a thread."""
        threads = usable_cores() if self.effective.device == "cpu" else 1
        return run_batches(self.encode, batches, threads=threads)


def read_graph(bundle: Path, name: str) -> bytes:
    """Read a file of ``onnx/`` of a bundle; what was hashed is what is returned.

    Raises SbkitError when it is missing or damaged.
    """
    folder = bundle / FOLDER
    if not (folder / name).exists():
        raise SbkitError(
            f"A bundle must hold {FOLDER}/{name} to be run by onnxruntime, but {bundle} does "
            "not. Export it: sbkit export RUN --out DIR --formats onnx"
        )
    content = read_regular(folder / name, largest=LARGEST, what="An ONNX model")
    sums = read_regular(folder / CHECKSUMS, largest=1 << 16, what="A list of checksums")
    check_unchanged({name: content}, sums, of=folder)
    return content


class OnnxGraphs:
    """The graphs of a task, each in a session of its own, with the interface of `TorchModel`.

    Attributes:
        effective: where the nodes of all run.
        metadata: of their files.
        settings: the plain data that callers of the graphs need.
    """

    def __init__(self, models: Mapping[str, OnnxModel]) -> None:
        """Take the session of each graph."""
        self._models = models
        first = next(iter(models.values()))
        nodes = sum((Counter(each.effective.nodes) for each in models.values()), Counter[str]())
        self.effective = replace(first.effective, nodes=dict(nodes))
        self.metadata = first.metadata
        with reading("An ONNX model", must="hold its settings", fix="Export it again."):
            self.settings = json.loads(first.metadata[SETTINGS])

    @classmethod
    def load(
        cls, graphs: Iterable[str], bundle: Path, *, device: str = "cpu", precision: str = "fp32"
    ) -> Self:
        """Load the graphs of a bundle, which are in fp32; raises SbkitError."""
        contents = {name: read_graph(bundle, f"{name}.onnx") for name in graphs}
        return cls({name: OnnxModel(each, device=device) for name, each in contents.items()})

    def run(self, graph: str, *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Run a graph of the task: arrays in, arrays out."""
        return self._models[graph].run(*arrays)


def available_providers() -> list[str]:
    """List the providers of the onnxruntime that is installed, if one is."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return [*onnxruntime.get_available_providers()]


def _parse_device(device: str) -> tuple[str, dict[str, str]]:
    """Return the provider of a device, and its options: which GPU, and float32 not as TF32."""
    fits = DEVICE.fullmatch(device)
    if fits is None:
        raise SbkitError(
            "`device` of the runtime onnx must be auto, cpu, cuda or cuda:N, but is "
            f"{device!r}. Choose one of them, or --runtime torch."
        )
    number = {} if device == "cpu" else {NUMBER: fits[2] or "0", "use_tf32": "0"}
    return PROVIDERS[fits[1]], number


def _read_back(session: Any, provider: str) -> Effective:
    """Return where and in which precision a session computes matrix products and convolutions.

    Raises SbkitError where another provider computes some of them than the one asked for.
    """
    subgraphs = session.get_provider_graph_assignment_info()
    nodes = [(each.ep_name, node.op_type) for each in subgraphs for node in each.get_nodes()]
    heavy = [(name, kind) for name, kind in nodes if any(part in kind for part in HEAVY)]
    elsewhere = Counter(name for name, _ in heavy if name != provider)
    if elsewhere or not heavy:
        where = ", ".join(f"{count} by {name}" for name, count in elsewhere.items())
        raise SbkitError(
            f"{provider} must run the model's matrix products and convolutions, but of {len(heavy)}"
            f" it has {len(heavy) - elsewhere.total()} ({where or 'nothing was placed'}). Check the"
            " driver and the CUDA libraries, or choose --device cpu."
        )
    on_gpu = provider == PROVIDERS["cuda"]
    number = session.get_provider_options().get(provider, {}).get(NUMBER)
    # Products of two activations are not quantized.
    precisions = {"int8" if kind in WHOLE else "fp32" for _, kind in heavy}
    return Effective(
        runtime="onnx",
        device=f"cuda:{number}" if on_gpu else "cpu",
        precision=" and ".join(sorted(precisions, reverse=True)),
        nodes=dict(Counter(name for name, _ in nodes)),  # `asdict` copies no Counter
    )


State = Mapping[str, npt.NDArray[Any]]  # (B, ...) each
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class OnnxStream(OnnxModel):
    """A session of the graph of one chunk, with what `TorchModel` has for chunks."""

    files: ClassVar = {"fp32": "streaming.onnx", "int8": "streaming.int8.onnx"}

    @property
    def chunks(self) -> ChunkSizes:
        """The samples of a chunk."""
        return ChunkSizes(*(self.read_samples(each.name) for each in fields(ChunkSizes)))

    def start(self) -> State:
        """Return the state of one session before its first sample."""
        _, _, *kept = self._session.get_inputs()
        return {each.name: np.zeros((1, *each.shape[1:]), TYPES[each.type]) for each in kept}

    def step(self, audio: Floats, lengths: Counts, state: State) -> tuple[LogProbs, State]:
        """Run a chunk of audio between -1 and 1: (B, S), (B,), state -> (B, U, V), (B,), state."""
        padded = np.pad(audio, ((0, 0), (0, self.chunks.window - audio.shape[1])))
        inputs = {"audio": padded, "audio_lengths": lengths, **state}
        log_probs, frames, *after = self._session.run(None, inputs)
        return LogProbs(log_probs, frames), dict(zip(state, after, strict=True))

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[State]
    ) -> list[tuple[Floats, State]]:
        """Run one chunk of each session in one batch: (S,) of int16 each -> (U, V), its state."""
        lengths = np.array([len(chunk) for chunk in chunks], np.int64)
        audio = np.zeros((len(chunks), lengths.max()), np.float32)
        for row, chunk in zip(audio, chunks, strict=True):
            row[: len(chunk)] = chunk / np.float32(FULL_SCALE)
        state = {name: np.concatenate([each[name] for each in states]) for name in states[0]}
        found, after = self.step(audio, lengths, state)
        return [
            (found.log_probs[n, :count], {name: each[n : n + 1] for name, each in after.items()})
            for n, count in enumerate(found.lengths.tolist())
        ]


def load_both(bundle: Path, *, device: str, precision: str) -> OnnxModel:
    """Load the model of whole clips, and beside it that of chunks where the bundle has one.

    Raises SbkitError when the first is missing, or either is damaged or does not run on the device.
    """
    model = OnnxModel.load(bundle, device=device, precision=precision)
    if (bundle / FOLDER / OnnxStream.files[precision]).exists():
        model.stream = OnnxStream.load(bundle, device=device, precision=precision)
    return model

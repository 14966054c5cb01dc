"""The protocols of models that run a bundle, and the types that they return.

The models in torch and onnxruntime and the thread around them implement the protocols; this module
imports neither library.

Legend: B sessions, S samples, U frames, V labels, D model width, N texts, L labels of a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sbkit.audio.io import Samples
from sbkit.base.arrays import Float64s, Int64s, LogProbs
from sbkit.bundle.side_inputs import SideInputs

ModelState = Any  # a session's state between two chunks, for the model that returned it
DeviceArray = Any  # an array on the device of a model, for that model only


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """The encoder's output for a clip: log_probs (U, V) of its frames, and states (U, D).

    The states are the input of the attention decoder. ONNX models return them only if that decoder
    generates texts.
    """

    log_probs: LogProbs
    states: DeviceArray = None

    def frames(self, first: int, end: int) -> "Encoded":
        states = None if self.states is None else self.states[first:end]
        return Encoded(self.log_probs[first:end], states)


@dataclass(frozen=True)
class ChunkSizes:
    """The chunk of a streaming model, in samples; the metadata of ONNX files has the same names.

    step: the shift from one chunk to the next.
    window: the audio that a chunk is computed from: ``step`` and the beginning of the next chunk.
    shortest: the shortest window that yields a frame, at the end of a session.
    """

    step: int
    window: int
    shortest: int


@dataclass(frozen=True, kw_only=True)
class EffectiveRuntime:
    """Where and how a model runs, as read back after it was loaded.

    runtime: torch or onnx.
    device: of all weights, such as cuda:0.
    precision: of the matrix products, such as bf16; "bf16 and fp32" if some parts, such as the
        features, stay in fp32.
    compiled: the mode of torch.compile, or None.
    nodes: the number of nodes of an ONNX graph that each execution provider runs.
    """

    runtime: str
    device: str
    precision: str
    compiled: str | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.runtime, self.device, self.precision]
        words += [f"compiled ({self.compiled})"] if self.compiled else []
        words += [f"{count} nodes on {name}" for name, count in self.nodes.items()]
        return ", ".join(words)


class AttentionDecoder(Protocol):
    """A decoder of texts that attends to the states of a clip's frames."""

    def score_texts(self, states: DeviceArray, texts: Int64s) -> Float64s:
        """Score texts: (U, D), (N, L + 1) with the end -> (N,)."""

    def generate(self, states: DeviceArray) -> list[int]:
        """Find the text of a clip, if the decoder generates texts: (U, D)."""


class ClipModel(AttentionDecoder, Protocol):
    """A model that takes whole clips."""

    @property
    def runs_on(self) -> EffectiveRuntime: ...

    @property
    def samples_per_frame(self) -> int:
        """The number of samples from one frame to the next."""

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        """Run the encoder on clips (S,), with their side inputs if there are any, in one batch."""

    def predict(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> Any:
        """Return the network's predictions for clips (S,) in one batch."""


class StreamingModel(Protocol):
    """A model that takes audio chunk by chunk, and keeps a state between chunks."""

    @property
    def chunks(self) -> ChunkSizes | None:
        """The sizes of its chunks; None for a model that only takes whole clips."""

    def start(self) -> ModelState:
        """Return the state of a session before its first sample."""

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ModelState]
    ) -> list[tuple[LogProbs, ModelState]]:
        """Run one chunk (S,) of each session in one batch; return (U, V) and the new state."""

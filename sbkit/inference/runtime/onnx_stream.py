"""A streaming model by onnxruntime, chunk by chunk: its state goes in and comes out as arrays.

Legend: B sessions, S samples, U frames, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.inference.runtime.model import ChunkSizes
from sbkit.inference.runtime.onnx_runtime import FOLDER, Counts, Floats, LogProbs, OnnxModel

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

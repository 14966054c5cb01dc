"""What every format is written of: a loaded bundle, and its graph, which is traced once."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.export import ExportedProgram

from sbkit.inference.bundle import Bundle
from sbkit.inference.formats.traced import WaveformModel, example_audio, trace
from sbkit.inference.onnx_runtime import Counts, Floats, LogProbs


@dataclass(frozen=True)
class Source:
    """A trained recognizer; ``own`` names modules of the user's that its parts come from."""

    bundle: Bundle
    own: frozenset[str] = frozenset()

    @cached_property
    def waveform(self) -> WaveformModel:
        """Return the model as one module."""
        return WaveformModel(self.bundle.model.network).eval()

    @cached_property
    def program(self) -> ExportedProgram:
        """Trace it."""
        return trace(self.waveform, *example_audio(self.bundle.config.sample_rate))


@torch.inference_mode()
def trained_log_probs(model: nn.Module, audio: Floats, lengths: Counts) -> LogProbs:
    """Run a module on audio between -1 and 1: (B, S), (B,) -> (B, U, V), (B,)."""
    log_probs, frames = model(torch.from_numpy(audio), torch.from_numpy(lengths))
    return LogProbs(log_probs.numpy(), frames.numpy())

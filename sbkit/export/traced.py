"""A trained recognizer as one module, and its graph, traced once for all formats.

Legend: B utterances, S samples, U frames, V vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import SbkitError
from sbkit.base.torch_internals import keep_device_guard
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.torch_model import TorchBundle

EXAMPLE = 3  # utterances; one or two could be taken for constants of the model


class WaveformModel(nn.Module):
    """A recognizer as one module, features inside: (B, S), (B,) -> (B, U, V), (B,).

    Audio is between -1 and 1, as every other library reads it; to scale it by a power of two
    changes no digit.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.parts = model.model  # owns every parameter
        self.model = model

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every token at every frame."""
        log_probs, frames = self.model.predict(audio * FULL_SCALE, audio_lengths)
        return log_probs, frames


def trace(
    module: nn.Module, *example: Tensor, free: tuple[Any, ...] | None = None
) -> ExportedProgram:
    """Trace a module of data (B, S, ...), and lengths (B,) if it takes them, for any B and S.

    free: other dimensions than these that are to be free, as torch.export takes them.

    Raises SbkitError when it cannot be traced, or only for the sizes of the example.
    """
    free = free or ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})[: len(example)]
    keep_device_guard()
    module.requires_grad_(
        False
    )  # ONNX's exporter gives an attention bias that has it other strides
    with torch.no_grad(), quietly():
        try:
            module(*example)  # measures what is measured once, and fills caches with real tensors
            program = torch.export.export(module, example, dynamic_shapes=free, strict=False)
        except Exception as error:  # a user's part may do what no exporter knows
            raise SbkitError(
                "A model must be made of operations that torch.export can trace for any batch and "
                f"length to have this format, but it raised {type(error).__name__} "
                f"({str(error)[:300]}). Leave the format out, or change that part."
            ) from error
    for graph in program.graph_module.modules():  # one in the other, as with autocast
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            node.meta.pop("stack_trace", None)  # it names folders of this machine, and is saved
    return program


def shortest(program: ExportedProgram) -> int:
    """Return the least length of audio that a traced graph takes, in samples."""
    audio = next(node for node in program.graph.nodes if node.name == "audio")
    symbol = audio.meta["val"].shape[1].node.expr
    return int(program.range_constraints[symbol].lower)


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the warnings, log lines and failed graphs that exporters print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class TrainedModel:
    """A trained recognizer; ``user_modules``, which `--import` names, hold some of its parts."""

    bundle: TorchBundle
    user_modules: frozenset[str] = frozenset()

    @cached_property
    def waveform(self) -> WaveformModel:
        """Return the model as one module."""
        return WaveformModel(self.bundle.model.network).eval()

    @cached_property
    def program(self) -> ExportedProgram:
        """Trace it on a second of noise of three lengths."""
        rate = self.bundle.config.sample_rate
        noise = torch.randn(EXAMPLE, rate, generator=torch.Generator().manual_seed(0)) / 10
        return trace(self.waveform, noise, torch.tensor([rate, rate * 3 // 4, rate // 2]))


@torch.inference_mode()
def trained_log_probs(model: nn.Module, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Run a module on audio between -1 and 1: (B, S), (B,) -> (B, U, V), (B,)."""
    log_probs, frames = model(torch.from_numpy(audio), torch.from_numpy(lengths))
    return BatchLogProbs(log_probs.numpy(), frames.numpy())

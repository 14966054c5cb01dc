"""A trained recognizer as one module, which formats are traced from and compared with.

Legend: B utterances, S samples, U frames, V vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import BundleError, SbkitError
from sbkit.base.libraries import place_of
from sbkit.base.torch_internals import keep_device_guard
from sbkit.runtime.onnx_model import BatchLogProbs

EXAMPLE_BATCH = 3  # utterances; exporters may treat a 1 or 2 as a constant of the model


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a graph, of which there may be one alone."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


class NetworkModule(nn.Module):
    """Base of modules that run a task's network."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.parts = network.model  # owns every parameter
        self.network = network


class WaveformModel(NetworkModule):
    """A recognizer as one module, with its features: (B, S), (B,) -> (B, U, V), (B,).

    Audio is between -1 and 1, as in other libraries; scaling it by a power of two is exact.
    """

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, frames = self.network.predict(audio * FULL_SCALE, audio_lengths)
        return log_probs, frames


class EncodingModel(NetworkModule):
    """A recognizer that returns its states, too: (B, S), (B,) -> (B, U, V), (B,), (B, U, D)."""

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states, frames = self.network.encode(audio * FULL_SCALE, audio_lengths)
        return self.network.frame_log_probs(states), frames, states


def trace(
    module: nn.Module, *example: Tensor, dynamic_shapes: tuple[Any, ...] | None = None
) -> ExportedProgram:
    """Trace a module that takes data (B, S, ...) and perhaps lengths (B,), for any B and S.

    ``dynamic_shapes``, in the form of torch.export, replaces these dynamic dimensions.
    """
    default = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})[: len(example)]
    dynamic_shapes = dynamic_shapes or default
    keep_device_guard()
    # The ONNX exporter gives an attention bias other strides if it requires a gradient.
    module.requires_grad_(False)
    with torch.no_grad(), quiet_exporters():
        try:
            module(*example)  # fills the module's caches with real tensors
            return torch.export.export(module, example, dynamic_shapes=dynamic_shapes, strict=False)
        except SbkitError:
            raise
        except Exception as error:  # a user's part may use anything
            raise BundleError(
                "torch.export cannot trace this model for any batch size and length: it raised "
                f"{type(error).__name__} ({str(error)[:300]}{place_of(error)})."
            ) from error


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Hide the warnings, log lines and failed graphs that exporters print."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)


@torch.inference_mode()
def trained_log_probs(model: nn.Module, audio: Float32s, lengths: Counts) -> BatchLogProbs:
    """Run a module on audio between -1 and 1: (B, S), (B,) -> (B, U, V), (B,)."""
    log_probs, frames = model(torch.from_numpy(audio), torch.from_numpy(lengths))
    return BatchLogProbs(log_probs.numpy(), frames.numpy())

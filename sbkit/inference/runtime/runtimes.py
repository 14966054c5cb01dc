"""The runtimes of a bundle: each makes its model in a thread of its own.

torch or onnxruntime is imported in that thread.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.machine import usable_cores
from sbkit.base.text import versions
from sbkit.checkpoint.integrity import listed_checksums
from sbkit.decoding.attention import Counts, Floats
from sbkit.inference.bundle.bundle import WEIGHTS, Bundle, load_torch, read_bundle
from sbkit.inference.runtime.model import (
    Batch,
    Effective,
    Encoded,
    Model,
    ModelThread,
    require_effective,
    run_batches,
)
from sbkit.inference.runtime.onnx_runtime import MADE_OF, PROVIDERS, OnnxModel

AUTO, FIRST_GPU = "auto", "cuda:0"
ON_RECOMPILE = ("error", "fallback")
WHEELS = ("onnxruntime", "onnxruntime-gpu")  # both are imported as onnxruntime
DRIVER = "libcuda.so.1"  # which comes with the driver, never with a wheel


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Where and how a model is to run.

    device: cpu, cuda, cuda:N or auto; runtime: torch or onnx; precision: fp32, bf16, fp16 or int8;
    compile: a mode of torch.compile, None for none; on_recompile: error or fallback.
    """

    device: str = AUTO
    runtime: str = "torch"
    precision: str = "fp32"
    compile: str | None = None
    on_recompile: str = "error"


def open_model(
    folder: Path, options: RuntimeOptions, *, own: frozenset[str] = frozenset()
) -> Bundle:
    """Read a bundle and make its model in a new thread, which is then its ``model``.

    Raises:
        SbkitError: the bundle is damaged, or what is options is not there.
    """
    if options.runtime not in RUNTIMES:
        raise SbkitError(
            f"`runtime` must be one of {', '.join(RUNTIMES)}, but is {options.runtime!r}. Choose "
            "one of them."
        )
    if options.on_recompile not in ON_RECOMPILE:
        raise SbkitError(
            f"`on_recompile` must be one of {', '.join(ON_RECOMPILE)}, but is "
            f"{options.on_recompile!r}. Choose one of them."
        )
    return RUNTIMES[options.runtime](folder, options, own)


def _open_torch(folder: Path, options: RuntimeOptions, own: frozenset[str]) -> Bundle:
    read = read_bundle(folder, WEIGHTS, own=own)

    def make() -> Model:
        from sbkit.distributed.device import resolve
        from sbkit.inference.runtime.compiled import Compilation

        _require_cuda(options)
        device = None if options.device == AUTO else options.device
        placement, compilation = resolve(device, options.precision), None
        if options.compile is not None:
            error = options.on_recompile == "error"
            compilation = Compilation(mode=options.compile, error=error)
        return load_torch(read, folder, own=own, placement=placement, compilation=compilation)

    return replace(read.bundle, model=ModelThread(make))


def _open_onnx(folder: Path, options: RuntimeOptions, own: frozenset[str]) -> Bundle:
    if options.compile is not None:
        raise SbkitError(
            "`compile` must be left out with the runtime onnx, which compiles nothing, but is "
            f"{options.compile}. Leave it out, or use the runtime torch."
        )
    read = read_bundle(folder, own=own)
    read.bundle.task.require("transcribe")  # classifiers are not exported to ONNX

    def make() -> Model:
        _require_cuda(options)
        device = options.device
        if device == AUTO:
            device = "cpu" if why_no_cuda("onnx") else "cuda"
        loaded = OnnxModel.load(folder, device=device, precision=options.precision)
        _require_same_weights(loaded, folder)
        model = OnnxClips(loaded)
        device = FIRST_GPU if device == "cuda" else device
        require_effective(model.effective, device=device, precision=options.precision)
        return model

    return replace(read.bundle, model=ModelThread(make))


def _require_same_weights(model: OnnxModel, folder: Path) -> None:
    """Raise SbkitError for a graph of another bundle's weights."""
    if model.metadata.get(MADE_OF) != listed_checksums(folder).get(WEIGHTS):
        raise SbkitError(
            f"An ONNX model must be made of the weights of its bundle, but the one in {folder} is "
            "made of others. Export it again."
        )


RUNTIMES = {"torch": _open_torch, "onnx": _open_onnx}


def _require_cuda(options: RuntimeOptions) -> None:
    """Raise SbkitError with the cause where a GPU is asked for and none can be used."""
    cause = why_no_cuda(options.runtime) if options.device.startswith("cuda") else None
    if cause is not None:
        raise SbkitError(
            f"`--device {options.device}` must be a GPU that {options.runtime} can use, but "
            f"{cause}, or pass --device cpu."
        )


class OnnxClips:
    """A model in onnxruntime, from clips to arrays, with the interface of `TorchModel`."""

    fallbacks = 0  # nothing is compiled

    def __init__(self, model: OnnxModel) -> None:
        """Wrap a loaded model; its nodes say where and how they run."""
        self._model = model
        self.samples_per_frame = int(model.metadata["samples_per_frame"])
        self.effective = Effective(
            runtime="onnx",
            device=model.device,
            precision=model.precision,
            nodes=dict(model.placement),
        )

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        lengths = np.array([len(clip) for clip in clips])
        audio = np.zeros((len(clips), lengths.max()), np.int16)
        for row, clip in zip(audio, clips, strict=True):
            row[: len(clip)] = clip
        found = self._model.log_probs(audio, lengths)
        rows = zip(found.log_probs, found.lengths, strict=True)
        return [Encoded(row[:count]) for row, count in rows]

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded] | Exception]:
        """Run the encoder on several batches; on the CPU at once, each in a thread."""
        threads = usable_cores() if self.effective.device == "cpu" else 1
        return run_batches(self.encode, batches, threads=threads)

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Raise SbkitError: the attention decoder is not exported to ONNX."""
        raise SbkitError(
            "An attention decoder must be run by torch, but this model is ONNX. Use --runtime "
            "torch."
        )


def has_driver() -> bool:
    """Check whether the driver of NVIDIA's GPUs can be loaded."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def why_no_cuda(runtime: str) -> str | None:
    """Return why a runtime cannot use an NVIDIA GPU, and what to do; None where it can."""
    cause = _torch_cause() if runtime == "torch" else _onnx_cause()
    if cause is None and not has_driver():
        return f"there is no NVIDIA driver ({DRIVER} cannot be loaded). Install one"
    return cause


def _torch_cause() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is a wheel without CUDA. Install one with it"
    return None


def _onnx_cause() -> str | None:
    found = versions(WHEELS)
    there = [name for name in WHEELS if found[name]]
    if len(there) > 1:
        return (
            f"both {' and '.join(there)} are installed, and one hides the other. Uninstall both, "
            "and install onnxruntime-gpu again"
        )
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed. Install onnxruntime-gpu"
    import onnxruntime

    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return "this onnxruntime is a wheel without CUDA. Uninstall it, and install onnxruntime-gpu"
    return None

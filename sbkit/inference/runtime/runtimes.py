"""The runtimes of a bundle: what makes its model, in a thread of its own.

torch and onnxruntime are imported in that thread, and only the one that is asked for.
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
from sbkit.inference.bundle.bundle import CONFIG, WEIGHTS, Bundle, load_torch, read_bundle
from sbkit.inference.runtime.model import (
    Batch,
    Effective,
    Heard,
    Model,
    ModelThread,
    require_effective,
    run_batches,
)
from sbkit.inference.runtime.onnx_runtime import MADE_OF, PROVIDERS, OnnxModel, read_count

AUTO, FIRST_GPU = "auto", "cuda:0"
LARGEST_LOG_PROB = 0.01  # 0 but for rounding
ON_RECOMPILE = ("error", "fallback")
WHEELS = ("onnxruntime", "onnxruntime-gpu")  # both are imported as onnxruntime
DRIVER = "libcuda.so.1"  # which comes with the driver, never with a wheel


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a model is asked to run on.

    device: cpu, cuda, cuda:N or auto; runtime: torch or onnx; precision: fp32, bf16, fp16 or int8;
    compile: a mode of torch.compile, None for none; on_recompile: error or fallback.
    """

    device: str = AUTO
    runtime: str = "torch"
    precision: str = "fp32"
    compile: str | None = None
    on_recompile: str = "error"


def open_model(folder: Path, wanted: Wanted, *, own: frozenset[str] = frozenset()) -> Bundle:
    """Read a bundle and make its model in a new thread, which is then its ``model``.

    Raises:
        SbkitError: the bundle is damaged, or what is wanted is not there.
    """
    if wanted.runtime not in RUNTIMES:
        raise SbkitError(
            f"`runtime` must be one of {', '.join(RUNTIMES)}, but is {wanted.runtime!r}. Choose "
            "one of them."
        )
    if wanted.on_recompile not in ON_RECOMPILE:
        raise SbkitError(
            f"`on_recompile` must be one of {', '.join(ON_RECOMPILE)}, but is "
            f"{wanted.on_recompile!r}. Choose one of them."
        )
    return RUNTIMES[wanted.runtime](folder, wanted, own)


def _open_torch(folder: Path, wanted: Wanted, own: frozenset[str]) -> Bundle:
    read = read_bundle(folder, WEIGHTS, own=own)

    def make() -> Model:
        from sbkit.distributed.device import resolve
        from sbkit.inference.runtime.compiled import Compilation

        _require_cuda(wanted)
        device = None if wanted.device == AUTO else wanted.device
        placement, compilation = resolve(device, wanted.precision), None
        if wanted.compile is not None:
            error = wanted.on_recompile == "error"
            compilation = Compilation(mode=wanted.compile, error=error)
        return load_torch(read, folder, own=own, placement=placement, compilation=compilation)

    return replace(read.bundle, model=ModelThread(make))


def _open_onnx(folder: Path, wanted: Wanted, own: frozenset[str]) -> Bundle:
    if wanted.compile is not None:
        raise SbkitError(
            "`compile` must be left out with the runtime onnx, which compiles nothing, but is "
            f"{wanted.compile}. Leave it out, or use the runtime torch."
        )
    read = read_bundle(folder, own=own)
    tokenizer = read.bundle.tokenizer  # classifiers are not exported to ONNX

    def make() -> Model:
        _require_cuda(wanted)
        device = wanted.device
        if device == AUTO:
            device = "cpu" if why_no_cuda("onnx") else "cuda"
        loaded = OnnxModel.load(folder, device=device, precision=wanted.precision)
        _refuse_other_weights(loaded, folder)
        model = OnnxClips(loaded, vocab_size=tokenizer.vocab_size)
        read.bundle.config.refuse_other_frames(model.samples_per_frame, of=folder / CONFIG)
        device = FIRST_GPU if device == "cuda" else device
        require_effective(model.effective, device=device, precision=wanted.precision)
        return model

    return replace(read.bundle, model=ModelThread(make))


def _refuse_other_weights(model: OnnxModel, folder: Path) -> None:
    """Refuse a graph of another bundle's weights; an earlier sbkit did not write whose it is."""
    made_of = model.metadata.get(MADE_OF, "")
    if made_of and made_of != listed_checksums(folder).get(WEIGHTS):
        raise SbkitError(
            f"An ONNX model must be made of the weights of its bundle, but the one in {folder} is "
            "made of others. Export it again."
        )


RUNTIMES = {"torch": _open_torch, "onnx": _open_onnx}


def _require_cuda(wanted: Wanted) -> None:
    """Refuse to look for a GPU where none can be used, with the cause."""
    cause = why_no_cuda(wanted.runtime) if wanted.device.startswith("cuda") else None
    if cause is not None:
        raise SbkitError(
            f"`--device {wanted.device}` must be a GPU that {wanted.runtime} can use, but "
            f"{cause}, or pass --device cpu."
        )


class OnnxClips:
    """A model in onnxruntime that is given clips and gives arrays, as one in torch."""

    fallbacks = 0  # nothing is compiled

    def __init__(self, model: OnnxModel, *, vocab_size: int) -> None:
        """Take a model that was loaded; it says itself where and how its nodes run."""
        self._model, self._vocab_size = model, vocab_size
        self.samples_per_frame = read_count(model.metadata, "samples_per_frame", least=1)
        self.effective = Effective(
            runtime="onnx",
            device=model.device,
            precision=model.precision,
            nodes=dict(model.placement),
        )

    def hear(self, clips: Sequence[Samples]) -> list[Heard]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        lengths = np.array([len(clip) for clip in clips])
        audio = np.zeros((len(clips), lengths.max()), np.int16)
        for row, clip in zip(audio, clips, strict=True):
            row[: len(clip)] = clip
        found = self._model.log_probs(audio, lengths)
        shape = np.shape(found.log_probs)
        if len(shape) != 3 or shape[2] != self._vocab_size:
            raise SbkitError(
                f"An ONNX model must give log-probabilities of {self._vocab_size} tokens, as its "
                f"bundle has, but gives an array of {shape}. Export it again."
            )
        counts = found.lengths.tolist()
        if not all(0 <= count <= shape[1] for count in counts):
            raise SbkitError(
                f"An ONNX model must give numbers of frames from 0 to the {shape[1]} of its "
                f"log-probabilities, but gives {str(counts)[:60]}. Export it again."
            )
        heard = [Heard(row[:n]) for row, n in zip(found.log_probs, counts, strict=True)]
        if not all((each.log_probs <= LARGEST_LOG_PROB).all() for each in heard):  # NaN neither
            raise SbkitError(
                "An ONNX model must give log-probabilities of at most 0, but gives NaN or others. "
                "Export it again."
            )
        return heard

    def hear_each(self, batches: Sequence[Batch]) -> list[list[Heard] | Exception]:
        """Run the encoder on several batches; on the CPU at once, each in a thread."""
        threads = usable_cores() if self.effective.device == "cpu" else 1
        return run_batches(self.hear, batches, threads=threads)

    def decoder_log_probs(self, states: Any, tokens: Counts) -> Floats:
        """Refuse: the attention decoder is not exported to ONNX."""
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
    """Return why a runtime cannot use a GPU of NVIDIA here, None where nothing speaks against it.

    It is a part of a sentence: the cause, and what to do about it.
    """
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

"""Open the model of a bundle with torch or onnxruntime, which its thread imports."""

import ctypes
import os
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from sbkit.base.arrays import Array
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import BundleError, ConfigError, DeviceError
from sbkit.bundle.bundle import Bundle, BundleContents, read_bundle
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.bundle.task import ONNX, PRECISIONS, Prediction
from sbkit.runtime.model_thread import (
    LoadedModel,
    ModelThread,
    PickledAsCall,
    StreamingUse,
    require_effective,
)
from sbkit.runtime.onnx_model import (
    ONNX_FOLDER,
    PROVIDERS,
    WEIGHTS_SHA256,
    OnnxGraphs,
    OnnxModel,
    OnnxStreamingModel,
    available_providers,
)

COMPILE_MODES = ("default", "reduce-overhead")
AUTO, FIRST_GPU = "auto", "cuda:0"
DRIVER = "libcuda.so.1"  # comes with the driver, never with a wheel


def model_options(options: Namespace) -> dict[str, Any]:
    """Return the options of a command that `open_model` takes."""
    names = ("device", "runtime", "precision", "compile", "user_modules")
    return {name: getattr(options, name) for name in names}


@dataclass(frozen=True)
class ThreadedBundle(Bundle):
    """A bundle whose model has a thread of its own."""

    model: ModelThread


def open_model(
    folder: Path | str,
    *,
    device: object = AUTO,
    runtime: str = "torch",
    precision: str = "fp32",
    compile: str | None = None,
    streaming: StreamingUse = "no",
    user_modules: frozenset[str] = frozenset(),
) -> ThreadedBundle:
    """Read a bundle, and make its model in a thread of its own; close it by `bundle.model.close()`.

    device, runtime, precision, compile, user_modules: as for `Transcriber.load`.
    streaming: whether the model runs chunk by chunk: "no", "only", or "also" (if the bundle has a
        model of chunks). In ONNX, this model is a file of its own.

    Raises:
        SbkitError: the bundle is damaged, or the device, runtime or precision is not available.
    """
    if runtime in PRECISIONS and precision not in PRECISIONS[runtime]:
        supported = "; ".join(f"{name}: {', '.join(names)}" for name, names in PRECISIONS.items())
        raise ConfigError(
            f"The precision {precision} is not supported by the runtime {runtime} ({supported}). "
            "Choose one of its precisions, or another runtime."
        )
    if runtime not in ("torch", ONNX) or (runtime == ONNX and compile is not None):
        raise ConfigError(
            f"The runtime {runtime} with `compile` {compile} is not supported: the runtime must "
            "be torch, or onnx, which compiles nothing. Choose one of them."
        )
    if compile not in (None, *COMPILE_MODES):
        raise ConfigError(f"`compile` must be {' or '.join(COMPILE_MODES)}; got {compile}.")
    if runtime == "torch" and not has_torch():
        raise DeviceError(
            "The runtime torch needs the package torch, which is not installed. Install it, or use "
            "the runtime onnx, which runs a bundle that was exported with this format."
        )
    folder = Path(folder).absolute()
    device = str(device)
    contents = read_bundle(folder, with_weights=runtime == "torch", user_modules=user_modules)

    def make() -> LoadedModel:
        if device.startswith("cuda") and (cause := why_no_cuda(runtime)):
            raise DeviceError(
                f"The device {device} needs a GPU that {runtime} can use, but {cause}, or choose "
                "the device cpu."
            )
        if runtime == ONNX:
            return _load_onnx(contents, folder, device, precision, streaming)
        from sbkit.distributed.device import resolve
        from sbkit.runtime.torch_model import Compilation, load_torch

        compilation = Compilation(mode=compile, streaming=streaming) if compile else None
        return load_torch(
            contents,
            folder,
            user_modules=user_modules,
            placement=resolve(None if device == AUTO else device, precision),
            compilation=compilation,
        )

    opened = ThreadedBundle.from_contents(contents, ModelThread(make))
    return opened.opened_by(
        partial(
            open_model,
            folder,
            device=device,
            runtime=runtime,
            precision=precision,
            compile=compile,
            streaming=streaming,
            user_modules=user_modules,
        )
    )


def _load_onnx(
    contents: BundleContents, folder: Path, device: str, precision: str, streaming: StreamingUse
) -> OnnxModel | OnnxGraphs:
    task = contents.task
    graphs = task.graphs
    if not graphs and streaming != "only":
        task.require_prediction("text", command="transcribe")
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # under torchrun, as with torch
    if device == AUTO:
        device = "cpu" if why_no_cuda(ONNX) else gpu
    device = gpu if device == "cuda" else device
    options = {"device": device, "precision": precision}
    model: OnnxModel | OnnxGraphs
    if graphs:
        model = OnnxGraphs(graphs, folder, device=device)
    elif streaming == "only":
        model = OnnxStreamingModel.load(folder, **options)
    else:
        model = OnnxModel.load(folder, **options)
        chunk_file = folder / ONNX_FOLDER / OnnxStreamingModel.files[precision]
        if streaming == "also" and chunk_file.exists():
            model.chunk_model = OnnxStreamingModel.load(folder, **options)
    if model.metadata.get(WEIGHTS_SHA256) != read_checksums(folder).get(WEIGHTS_FILE):
        raise BundleError(
            f"The ONNX model in {folder} was not made from the weights of its bundle. Export it "
            "again."
        )
    require_effective(model.effective, device=device, precision=precision)
    return model


def why_no_cuda(runtime: str) -> str | None:
    """Return why a runtime cannot use an NVIDIA GPU, and what to do; None if it can."""
    if runtime != ONNX and not has_torch():
        return "torch is not installed. Install it, or use the runtime onnx"
    if not has_driver():
        return f"there is no NVIDIA driver ({DRIVER} cannot be loaded). Install one"
    if runtime == ONNX:
        if PROVIDERS["cuda"] not in available_providers():
            return (
                "there is no onnxruntime with CUDA, or another wheel hides it. Uninstall "
                "onnxruntime and onnxruntime-gpu, and install onnxruntime-gpu"
            )
    else:
        import torch

        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) is a wheel without CUDA. Install one with it"
    return None


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


def has_driver() -> bool:
    """Return whether NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


class GraphModel(PickledAsCall):
    """A bundle whose task has graphs, such as a codec's `encode` and `decode`.

    command, prediction: a command of sbkit, and what the task of its bundles predicts.
    settings: the plain data that callers of the graphs need.
    """

    command: ClassVar[str]
    prediction: ClassVar[Prediction]

    def __new__(cls, folder: Path | str, **options: Any) -> Self:
        return super().__new__(cls, Path(folder).absolute(), **options)

    def __init__(self, folder: Path | str, **options: Any) -> None:
        """Open a bundle with the options of `open_model`.

        Raises:
            SbkitError: the bundle is damaged or has another task, or the device is not available.
        """
        self.bundle = open_model(Path(folder), **options)
        self.bundle.task.require_prediction(self.prediction, command=self.command)
        self._thread = self.bundle.model
        self.sample_rate = self.bundle.config.sample_rate
        self.effective = self._thread.effective
        self.settings: dict[str, Any] = self._thread.call(lambda model: model.settings)

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> Self:
        """Open a bundle, as the constructor does."""
        return cls(folder, **options)

    @classmethod
    def from_options(cls, options: Namespace) -> Self:
        """Open the bundle that the options of a command name."""
        return cls(options.bundle, **model_options(options))

    def run(self, graph: str, *arrays: Array) -> list[Array]:
        """Run the graph of that name: arrays in, arrays out."""
        outputs: list[Array] = self._thread.call(lambda model: model.run(graph, *arrays))
        return outputs

    def close(self) -> None:
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""The runtimes of a bundle: torch or onnxruntime is imported in the thread that makes the model."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sbkit.base.checksums import listed_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.machine import PRECISIONS
from sbkit.bundle.bundle import WEIGHTS, Bundle, ReadBundle, read_bundle
from sbkit.runtime.model import ModelThread, require_effective
from sbkit.runtime.onnx_model import (
    MADE_OF,
    PROVIDERS,
    OnnxGraphs,
    OnnxModel,
    OnnxStream,
    available_providers,
    load_both,
)
from sbkit.tasks.task import ONNX

AUTO, FIRST_GPU = "auto", "cuda:0"
DRIVER = "libcuda.so.1"  # which comes with the driver, never with a wheel


def open_model(
    folder: Path,
    *,
    device: str = AUTO,
    runtime: str = "torch",
    precision: str = "fp32",
    compile: str | None = None,
    live: bool | None = False,
    user_modules: frozenset[str] = frozenset(),
) -> Bundle:
    """Read a bundle and make its model in a new thread, which is then its ``model``.

    device: cpu, cuda, cuda:N or auto; runtime: torch or onnx; precision: fp32, bf16, fp16 or int8;
    compile: a mode of torch.compile, None for none; live: to be run chunk by chunk, for which onnx
    has another file, None for both where it is there; own: modules of the user's.

    Raises:
        SbkitError: the bundle is damaged, or the device, runtime or precision is not there.
    """
    if runtime in PRECISIONS and precision not in PRECISIONS[runtime]:
        known = "; ".join(f"{name}: {', '.join(each)}" for name, each in PRECISIONS.items())
        raise SbkitError(
            f"`--precision` must be one that the runtime has ({known}), but is {precision} with "
            f"{runtime}. Choose one of them, or pass another --runtime."
        )
    if runtime == "torch" and not has_torch():
        raise SbkitError(
            "`--runtime torch` needs the package torch, which is not installed. Pass --runtime "
            "onnx, which runs a bundle exported with --formats onnx, or install torch."
        )
    read = read_bundle(
        folder, *([WEIGHTS] if runtime == "torch" else []), user_modules=user_modules
    )
    if runtime == "torch":
        make: Callable[[], Any] = partial(
            _load_torch, read, folder, device, precision, compile, live, user_modules
        )
    elif runtime == "onnx" and compile is None:
        load: Callable[..., Any] = (
            load_both if live is None else (OnnxStream if live else OnnxModel).load
        )
        graphs = [name for name, each in read.bundle.task.graphs.items() if each.format == ONNX]
        if graphs:
            load = partial(OnnxGraphs.load, graphs)
        elif not live:
            read.bundle.task.require("transcribe")  # classifiers are not exported to ONNX
        make = partial(_load_onnx, folder, device, precision, load)
    else:
        raise SbkitError(
            "`runtime` must be torch or onnx, which compiles nothing, but is "
            f"{runtime} with compile: {compile}. Choose one of them."
        )
    return replace(read.bundle, model=ModelThread(make))


def _load_torch(
    read: ReadBundle,
    folder: Path,
    device: str,
    precision: str,
    compile: str | None,
    live: bool | None,
    user_modules: frozenset[str],
) -> Any:
    from sbkit.distributed.device import resolve
    from sbkit.runtime.shapes import Compilation
    from sbkit.runtime.torch_model import load_torch

    _require_cuda(device, "torch")
    placement = resolve(None if device == AUTO else device, precision)
    compilation = None if compile is None else Compilation(mode=compile, live=live)
    return load_torch(
        read, folder, user_modules=user_modules, placement=placement, compilation=compilation
    )


def _load_onnx(folder: Path, device: str, precision: str, load: Callable[..., Any]) -> Any:
    _require_cuda(device, "onnx")
    if device == AUTO:
        device = "cpu" if why_no_cuda("onnx") else FIRST_GPU
    model = load(folder, device=device, precision=precision)
    if model.metadata.get(MADE_OF) != listed_checksums(folder).get(WEIGHTS):
        raise SbkitError(
            f"An ONNX model must be made of the weights of its bundle, but the one in {folder} is "
            "made of others. Export it again."
        )
    device = FIRST_GPU if device == "cuda" else device
    require_effective(model.effective, device=device, precision=precision)
    return model


def _require_cuda(device: str, runtime: str) -> None:
    """Raise SbkitError with the cause where a GPU is asked for and none can be used."""
    cause = why_no_cuda(runtime) if device.startswith("cuda") else None
    if cause is not None:
        raise SbkitError(
            f"`--device {device}` must be a GPU that {runtime} can use, but {cause}, or pass "
            "--device cpu."
        )


def why_no_cuda(runtime: str) -> str | None:
    """Return why a runtime cannot use an NVIDIA GPU, and what to do; None where it can."""
    if runtime == "onnx":
        if PROVIDERS["cuda"] not in available_providers():
            return (
                "there is no onnxruntime with CUDA, or another wheel hides it. Uninstall "
                "onnxruntime and onnxruntime-gpu, and install onnxruntime-gpu"
            )
    elif not has_torch():
        return "torch is not installed. Install it, or pass --runtime onnx"
    else:
        import torch

        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) is a wheel without CUDA. Install one with it"
    if not has_driver():
        return f"there is no NVIDIA driver ({DRIVER} cannot be loaded). Install one"
    return None


def has_torch() -> bool:
    """Check whether torch is installed."""
    return find_spec("torch") is not None


def has_driver() -> bool:
    """Check whether the driver of NVIDIA's GPUs can be loaded."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True

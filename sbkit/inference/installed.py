"""What is installed here to run models on a GPU with, and why one cannot be used."""

import ctypes
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

WHEELS = ("onnxruntime", "onnxruntime-gpu")  # both are imported as onnxruntime
DRIVER = "libcuda.so.1"  # which comes with the driver, never with a wheel
CUDA = "CUDAExecutionProvider"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
    there = [name for name in WHEELS if installed_version(name)]
    if len(there) > 1:
        return (
            f"both {' and '.join(there)} are installed, and one hides the other. Uninstall both, "
            "and install onnxruntime-gpu again"
        )
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed. Install onnxruntime-gpu"
    import onnxruntime

    if CUDA not in onnxruntime.get_available_providers():
        return "this onnxruntime is a wheel without CUDA. Uninstall it, and install onnxruntime-gpu"
    return None

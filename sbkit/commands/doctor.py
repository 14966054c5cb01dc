"""`sbkit doctor`: show versions, devices and compiler of this machine, and try a bundle on it."""

import os
import platform
import shutil
from argparse import Namespace

import soundfile

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.imports import import_torchaudio
from sbkit.base.machine import usable_cores
from sbkit.base.messages import printable
from sbkit.base.versions import versions
from sbkit.runtime.onnx_model import MODEL_FILES, ONNX_FOLDER, available_providers
from sbkit.runtime.runtimes import has_torch, open_model, why_no_cuda

MORE_PACKAGES = (  # besides the PACKAGES of sbkit.base.versions
    "hyperpyyaml",
    "av",
    "soxr",
    "soundfile",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "sherpa-onnx",
    "transformers",
    "kaldifst",
    "starlette",
    "uvicorn",
)


def doctor(options: Namespace) -> int:
    """Describe this machine, and load each format of a bundle, if given; return the exit code."""
    for subject, text in describe_machine().items():
        print(f"{subject}: {text}", flush=True)
    if options.bundle is None:
        return 0
    return _try_bundle(options)


def _try_bundle(options: Namespace) -> int:
    """Load each format of the bundle, and print the device that it runs on, or the error."""
    folder = options.bundle
    exit_code = 0
    onnx_targets = [
        ("onnx", precision)
        for precision, file in MODEL_FILES.items()
        if (folder / ONNX_FOLDER / file).exists()
    ]
    # Without ONNX files and without torch, the error of the torch format says what to install.
    torch_targets = [("torch", "fp32")] if has_torch() or not onnx_targets else []
    for runtime, precision in [*torch_targets, *onnx_targets]:
        try:
            bundle = open_model(
                folder, runtime=runtime, precision=precision, user_modules=options.user_modules
            )
        except SbkitError as error:
            exit_code = BAD_INPUT
            result = str(error)
        else:
            result = f"runs on {bundle.model.effective}"
            bundle.model.close()
        print(printable(f"{folder}, {runtime} {precision}: {result}"), flush=True)
    return exit_code


def describe_machine() -> dict[str, str]:
    """Return the versions, devices, providers and compiler of this machine, by subject."""
    subjects = {"system": platform.platform()}
    for package, version in versions(MORE_PACKAGES).items():
        subjects[package] = version or "not installed"
    devices = [f"cpu with {usable_cores()} cores"]
    if has_torch():
        import torch

        from sbkit.distributed.device import PRECISIONS_BY_DEVICE_TYPE, count_local_devices

        subjects["torch"] = torch.__version__  # its end, such as +cpu or +cu130, names the build
        subjects["torchaudio"] = _try_torchaudio(subjects["torchaudio"])
        for device_type in PRECISIONS_BY_DEVICE_TYPE:
            if device_type != "cpu":
                for index in range(count_local_devices(device_type)):
                    name = torch.cuda.get_device_name(index) if device_type == "cuda" else ""
                    devices.append(f"{device_type}:{index} {name}".strip())
    subjects["libsndfile"] = soundfile.__libsndfile_version__
    subjects["devices"] = ", ".join(devices)
    for runtime in ("torch", "onnx"):
        cuda_problem = why_no_cuda(runtime)
        usable = "usable" if cuda_problem is None else f"not usable, because {cuda_problem}"
        subjects[f"CUDA with {runtime}"] = usable
    subjects["onnxruntime's providers"] = ", ".join(available_providers()) or "none"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    subjects["compiler"] = compiler or "none, so --compile cannot be used"
    return subjects


def _try_torchaudio(version: str) -> str:
    """Return the version, or why torchaudio does not work with this torch."""
    try:
        import_torchaudio()
    except SbkitError as error:
        return str(error)
    return version

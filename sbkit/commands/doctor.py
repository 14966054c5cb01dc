"""`sbkit doctor`: versions, devices, providers and compiler of this machine, and a bundle."""

import os
import platform
import shutil
from argparse import Namespace
from functools import partial

import soundfile

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.imports import import_torchaudio
from sbkit.base.machine import usable_cores
from sbkit.base.messages import printable
from sbkit.base.versions import versions
from sbkit.runtime.onnx_model import MODEL_FILES, ONNX_FOLDER, available_providers
from sbkit.runtime.runtimes import has_torch, open_model, why_no_cuda

PACKAGES = ("soundfile", "onnxruntime", "onnxruntime-gpu")


def doctor(options: Namespace) -> int:
    """Describe this machine, and load each format of a bundle, if given; return the exit code."""
    for subject, text in describe_machine().items():
        print(f"{subject}: {text}", flush=True)
    code, folder = 0, options.bundle
    if folder is not None:
        open_here = partial(open_model, folder, user_modules=options.user_modules)
        onnx = [
            ("onnx", name)
            for name, file in MODEL_FILES.items()
            if (folder / ONNX_FOLDER / file).exists()
        ]
        torch = [("torch", "fp32")] if has_torch() or not onnx else []
        for runtime, precision in [*torch, *onnx]:
            try:
                model = open_here(runtime=runtime, precision=precision).model
            except SbkitError as error:
                code, result = BAD_INPUT, str(error)
            else:
                result = f"runs on {model.effective}"
                model.close()
            print(printable(f"{folder}, {runtime} {precision}: {result}"), flush=True)
    return code


def describe_machine() -> dict[str, str]:
    """Return the versions, devices, providers and compiler of this machine, by subject."""
    devices: list[str] = []
    packages = {name: version or "not installed" for name, version in versions(PACKAGES).items()}
    if has_torch():
        from sbkit.distributed.device import PRECISIONS_BY_DEVICE_TYPE, count_local_devices

        kinds = [kind for kind in PRECISIONS_BY_DEVICE_TYPE if kind != "cpu"]
        devices = [f"{kind}:{n}" for kind in kinds for n in range(count_local_devices(kind))]
        packages["torchaudio"] = _try_torchaudio(packages["torchaudio"])
    causes = {runtime: why_no_cuda(runtime) for runtime in ("torch", "onnx")}
    return {
        "system": platform.platform(),
        **packages,
        "libsndfile": soundfile.__libsndfile_version__,
        "devices": ", ".join([f"cpu with {usable_cores()} cores", *devices]),
        **{f"CUDA with {name}": f"no: {why}" if why else "usable" for name, why in causes.items()},
        "onnxruntime's providers": ", ".join(available_providers()) or "none",
        "compiler": shutil.which(os.environ.get("CXX", "g++"))
        or "none, so --compile cannot be used",
    }


def _try_torchaudio(version: str) -> str:
    """Return the version, or why torchaudio does not work with this torch."""
    try:
        import_torchaudio()
    except SbkitError as error:
        return str(error)
    return version

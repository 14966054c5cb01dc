"""`sbkit doctor`: describe this machine, and try PyAV, soundfile, the cache and ONNX Runtime."""

import os
import platform
import shutil
from argparse import Namespace
from importlib import import_module

from sbkit.base.errors import BAD_INPUT
from sbkit.base.imports import explain_torchaudio
from sbkit.base.machine import available_providers, has_torch, usable_cores, why_no_cuda
from sbkit.base.messages import printable
from sbkit.base.versions import versions
from sbkit.cli.arguments import Parser
from sbkit.export.format_table import FORMATS

MORE_PACKAGES = (  # besides the PACKAGES of sbkit.base.versions
    "hyperpyyaml",
    "av",
    "soxr",
    "soundfile",
    *sorted({package for form in FORMATS.values() for package in form.packages}),
    "onnxruntime-gpu",
    "starlette",
    "uvicorn",
)


def add_commands(parser: Parser) -> None:
    """Add `doctor`."""
    help = "print which devices and packages work on this machine"
    parser.add_command("doctor", doctor, help)


def doctor(options: Namespace) -> int:
    """Describe this machine, print the result or the error of each trial, return the exit code."""
    from sbkit.commands.trials import TRIALS

    for subject, text in machine_facts().items():
        print(f"{subject}: {text}", flush=True)
    exit_code = 0
    for subject, trial in TRIALS.items():
        if subject == "onnxruntime" and not available_providers():
            continue
        try:
            result = trial()
        except Exception as error:  # an installation may be broken in any way
            exit_code = BAD_INPUT
            cause = error.__cause__ or error  # such as the TypeError behind "not audio"
            result = f"{type(cause).__name__}: {cause}"
        print(printable(f"trial of {subject}: {result}"), flush=True)
    return exit_code


def machine_facts() -> dict[str, str]:
    """Return the versions, devices, providers and compiler of this machine, by subject."""
    import soundfile

    facts = {"system": platform.platform()}
    for package, version in versions(MORE_PACKAGES).items():
        facts[package] = version or "not installed"
    devices = [f"cpu with {usable_cores()} cores"]
    if has_torch():
        import torch

        from sbkit.distributed.device import PRECISIONS_BY_DEVICE_TYPE, count_local_devices

        facts["torch"] = torch.__version__  # its end, such as +cpu or +cu130, names the build
        try:
            import_module("torchaudio")
        except Exception as error:  # a library of another torch raises many kinds
            facts["torchaudio"] = explain_torchaudio(error)
        for device_type in PRECISIONS_BY_DEVICE_TYPE:
            if device_type != "cpu":
                for index in range(count_local_devices(device_type)):
                    name = torch.cuda.get_device_name(index) if device_type == "cuda" else ""
                    devices.append(f"{device_type}:{index} {name}".strip())
    facts["libsndfile"] = soundfile.__libsndfile_version__
    facts["devices"] = ", ".join(devices)
    for runtime in ("torch", "onnx"):
        cuda_problem = why_no_cuda(runtime)
        status = "usable" if cuda_problem is None else f"not usable, because {cuda_problem}"
        facts[f"CUDA with {runtime}"] = status
    facts["onnxruntime's providers"] = ", ".join(available_providers()) or "none"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    facts["compiler"] = compiler or "none, so --compile cannot be used"
    return facts

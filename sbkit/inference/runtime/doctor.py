"""What models can run on here: versions, devices, providers, compiler, threads; and a bundle.

Formats that sbkit runs are loaded, and asked what they run on. Of other formats it reports whether
their files are intact, and whether the package that runs them is installed.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import soundfile
import torch

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.machine import describe_waiting, usable_cores
from sbkit.base.text import __version__, printable, versions
from sbkit.checkpoint.integrity import find_damage
from sbkit.distributed.device import SUPPORTED, count_here
from sbkit.inference.runtime.onnx_runtime import FILES, FOLDER
from sbkit.inference.runtime.runtimes import WHEELS, RuntimeOptions, open_model, why_no_cuda

PACKAGES = ("torch", "torchaudio", "numpy", "soundfile", "sentencepiece", *WHEELS)
CONSUMERS = {  # of the formats that `sbkit transcribe` does not run: the packages that do
    **{name: name for name in ("torch", "sherpa-onnx", "speechbrain")},
    "hub": "sbkit",
}


Line = tuple[str, str]  # subject, text


def print_report(folder: Path | None, *, own: frozenset[str] = frozenset()) -> int:
    """Print what is here; ``folder`` is a bundle to be tried. Return the exit code."""
    code = 0
    for subject, text in examine():
        print(printable(f"{subject}: {text}"), flush=True)
    for subject, text, is_usable in () if folder is None else _formats(folder, own):
        print(printable(f"{subject}: {text}"), flush=True)
        code = code if is_usable else BAD_INPUT
    return code


def examine() -> Iterator[Line]:
    """Yield what is here, a line for each subject."""
    yield "sbkit", f"{__version__}, Python {platform.python_version()}"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    for name, version in versions(PACKAGES).items():
        yield name, version or "not installed"
    yield "libsndfile", soundfile.__libsndfile_version__
    yield "devices", ", ".join(_devices())
    for runtime in ("torch", "onnx"):
        cause = why_no_cuda(runtime)
        yield f"CUDA with {runtime}", "usable" if cause is None else f"no: {cause}"
    yield "onnxruntime's providers", ", ".join(_providers()) or "none"
    yield "compiler", _compiler() or "none, so that --compile cannot be used"
    yield "threads", _threads()


def _devices() -> Iterator[str]:
    yield f"cpu with {usable_cores()} cores"
    for kind in SUPPORTED:
        for number in range(count_here(kind) if kind != "cpu" else 0):
            named = torch.cuda.get_device_name(number) if kind == "cuda" else ""
            yield f"{kind}:{number} {named}".strip()


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:
        return []
    providers: list[str] = onnxruntime.get_available_providers()
    return providers


def _compiler() -> str | None:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        return None
    command = [found, "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0]


def _threads() -> str:
    settings = [f"{key}={value}" for key, value in os.environ.items() if key.startswith("OMP_")]
    return ", ".join([describe_waiting(torch.get_num_threads()), *settings])


def _formats(folder: Path, own: frozenset[str]) -> Iterator[tuple[str, str, bool]]:
    """Load each format of a bundle; yield its name, what it runs on or why not, and if it can."""
    tried = [RuntimeOptions(runtime="torch")]
    tried += [
        RuntimeOptions(runtime="onnx", precision=precision)
        for precision, file in FILES.items()
        if (folder / FOLDER / file).exists()
    ]
    for options in tried:
        subject = f"{folder}, {options.runtime} {options.precision}"
        try:
            model = open_model(folder, options, own=own).model
        except SbkitError as error:
            yield subject, str(error), False
        else:
            yield subject, f"runs on {model.effective}", True
            model.close()
    for name, package in CONSUMERS.items():  # not loaded: some formats run what they hold
        if not (folder / name).is_dir():
            continue
        damage, version = find_damage(folder / name), versions([package])[package]
        if damage is not None:
            yield str(folder / name), f"is not what was written: {damage}", False
        else:
            there = f"{package} {version or '(not installed)'}"
            yield str(folder / name), f"is intact, and is run by {there}", True

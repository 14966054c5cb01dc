"""What models can run on here: versions, devices, providers, compiler, threads; and a bundle.

Formats that sbkit runs are loaded, and asked what they run on. Of other formats it reports whether
their files are intact, and whether the package that runs them is installed.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
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
from sbkit.train.compiling import CXX, find_compiler

PACKAGES = ("torch", "torchaudio", "numpy", "soundfile", "sentencepiece", *WHEELS)
CONSUMERS = {  # of the formats that `sbkit transcribe` does not run: the packages that do
    **{name: name for name in ("torch", "sherpa-onnx", "speechbrain")},
    "hub": "sbkit",
}


@dataclass(frozen=True)
class Fact:
    """A line of the report; ``is_usable`` is false for a format that cannot be run."""

    subject: str
    text: str
    is_usable: bool = True

    def __str__(self) -> str:
        """Write it as a line."""
        return printable(f"{self.subject}: {self.text}")


def print_facts(folder: Path | None, *, own: frozenset[str] = frozenset()) -> int:
    """Print the report, and return the exit code."""
    code = 0
    for fact in examine(folder, own=own):
        print(fact, flush=True)
        code = code if fact.is_usable else BAD_INPUT
    return code


def examine(folder: Path | None, *, own: frozenset[str] = frozenset()) -> Iterator[Fact]:
    """Yield the lines of the report; ``folder`` is a bundle to be tried."""
    yield Fact("sbkit", f"{__version__}, Python {platform.python_version()}")
    yield Fact("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    found = versions(PACKAGES)
    for name in PACKAGES:
        yield Fact(name, found[name] or "not installed")
    yield Fact("libsndfile", soundfile.__libsndfile_version__)
    yield Fact("devices", ", ".join(_devices()))
    for runtime in ("torch", "onnx"):
        cause = why_no_cuda(runtime)
        yield Fact(f"CUDA with {runtime}", "usable" if cause is None else f"no: {cause}")
    yield Fact("onnxruntime's providers", ", ".join(_providers()) or "none")
    yield Fact("compiler", _compiler() or "none, so that --compile cannot be used")
    yield Fact("threads", _threads())
    if folder is not None:
        yield from _formats(folder, own)


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
    found = find_compiler(*CXX)
    if found is None:
        return None
    command = [found, "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0]


def _threads() -> str:
    settings = [f"{key}={value}" for key, value in os.environ.items() if key.startswith("OMP_")]
    return ", ".join([describe_waiting(torch.get_num_threads()), *settings])


def _formats(folder: Path, own: frozenset[str]) -> Iterator[Fact]:
    """Load each format of a bundle, and yield what it runs on or why it does not."""
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
            yield Fact(subject, str(error), is_usable=False)
        else:
            yield Fact(subject, f"runs on {model.effective}")
            model.close()
    for name, package in CONSUMERS.items():
        if (folder / name).is_dir():
            yield _for_others(folder / name, package)


def _for_others(folder: Path, package: str) -> Fact:
    """Describe a format that sbkit does not run: loading some of them runs what they hold."""
    damage, found = find_damage(folder), versions([package])[package]
    if damage is not None:
        return Fact(str(folder), f"is not what was written: {damage}", is_usable=False)
    there = f"{package} {found}" if found else f"{package}, which is not installed"
    return Fact(str(folder), f"is whole, and is run by {there}")

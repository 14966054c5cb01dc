"""One device and one precision, parsed once; only the device's type reaches autocast."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from sbkit.base.errors import SbkitError

Count = Callable[[str], int]  # of the devices of a type that a machine has

FORMS = "cpu, cuda, cuda:N, mps, xpu or xpu:N"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUPPORTED = {  # device type -> precisions; fp16, which needs a GradScaler, is for GPUs
    "cpu": ("fp32", "bf16"),
    "cuda": ("fp32", "bf16", "fp16"),
    "mps": ("fp32", "bf16"),
    "xpu": ("fp32", "bf16", "fp16"),
}


@dataclass(frozen=True)
class Placement:
    """Where a model runs and in which precision; a pair that is known to work."""

    device: torch.device
    precision: str

    def autocast(self) -> AbstractContextManager[object]:
        """Open a new autocast context of the declared precision; fp32 leaves everything alone."""
        return torch.autocast(
            self.device.type, DTYPES[self.precision], enabled=self.precision != "fp32"
        )

    def grad_scaler(self) -> GradScaler:
        """Make a GradScaler, which does something in fp16 and is a quiet object otherwise."""
        return GradScaler(self.device.type, enabled=self.precision == "fp16")


def describe_products(device: torch.device) -> str:
    """Return which float32 products are rounded to TF32, as PyTorch and SpeechBrain set it."""
    if device.type != "cuda":
        return ""
    torchs: Any = torch.backends
    backends = {"products": torchs.cuda.matmul, "convolutions": torchs.cudnn.conv}
    rounded = [name for name, each in backends.items() if each.fp32_precision == "tf32"]
    return f"; float32 {' and '.join(rounded)} in TF32" if rounded else ""


def note_precision(placement: Placement) -> str | None:
    """Return a note on a precision that may cost time where it is meant to save some.

    Seconds of audio per second of the default YAML on two cores with AMX: 211 in fp32, 113 in bf16.
    """
    if placement.device.type != "cpu" or placement.precision != "bf16":
        return None
    return (
        "note: `precision: bf16` may train slower than fp32 on a CPU (where it was measured, on "
        "one with AMX, at half the speed). `sbkit check` measures a step in either."
    )


def count_here(device_type: str) -> int:
    """Count the devices of a type that torch sees on this machine."""
    if device_type == "cpu":
        return 1
    backend = torch.get_device_module(device_type)
    return int(backend.device_count()) if backend.is_available() else 0


def count_on(target: str) -> Count:
    """Count the devices of the machine meant: `cuda:8` has eight of them, `cpu` none.

    Raises SbkitError when the target is none of FORMS, or has no device.
    """
    meant = parse_device(target, key="--target")
    number = 1 if meant.index is None else meant.index
    if number == 0:
        raise SbkitError(
            f"`--target` must say how many devices there are, but {target} says none. Write "
            f"--target={meant.type}:1, or --target=cpu."
        )
    return lambda device_type: number if device_type == meant.type else int(device_type == "cpu")


def resolve(
    device: str | torch.device | None, precision: str, *, count: Count = count_here
) -> Placement:
    """Check a declared device and precision against this machine, or the one that `count` knows.

    ``None`` takes the first GPU, or the CPU where there is none. Under torchrun, `cuda` and `xpu`
    without a number are the device of the local rank.
    Raises SbkitError when the pair is not supported, or the machine has no such device.
    """
    parsed = choose_device(device, count)
    check_precision(parsed.type, precision)
    return Placement(find_device(parsed, count), precision)


def choose_device(device: str | torch.device | None, count: Count = count_here) -> torch.device:
    """Parse a declared device; for none, take the GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda" if count("cuda") else "cpu"
    return parse_device(device)


def widest_float(device: torch.device) -> torch.dtype:
    """Name the type to add up long sums in: float64, except on MPS, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def parse_device(device: str | torch.device, *, key: str = "device") -> torch.device:
    """Turn `cuda:1` and its like into a torch.device; refuse what is not one of FORMS."""
    if isinstance(device, torch.device) and device.type in SUPPORTED:
        return device
    text = str(device)
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:(0|[1-9]\d?))?", text, re.ASCII):
        raise SbkitError(
            f"`{key}` must be {FORMS}, but is {device!r}. Write it in one of these forms."
        )
    return torch.device(text)


def check_precision(device_type: str, precision: str, *, key: str = "precision") -> None:
    """Refuse a precision that the type of device cannot train in, by name."""
    if precision not in [*DTYPES]:  # a list cannot be looked up
        raise SbkitError(
            f"`{key}` must be one of {', '.join(DTYPES)}, but is {precision!r}. Choose one of them."
        )
    if precision not in SUPPORTED[device_type]:
        raise SbkitError(
            f"`{key}` on {device_type} must be one of {', '.join(SUPPORTED[device_type])}, "
            f"but is {precision}. Use --{key}=bf16, or another device."
        )


def find_device(device: torch.device, count: Count = count_here) -> torch.device:
    """Add the number of a device that is there: that of the local rank, unless it has one."""
    if device.type == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index not in (None, local_rank) and local_ranks > 1:
        raise SbkitError(
            f"`device` must have no number when torchrun starts {local_ranks} processes, so that "
            f"each takes its own, but is {device}. Write --device={device.type}."
        )
    index = local_rank if device.index is None else device.index
    if index >= (there := count(device.type)):
        number = {0: "no device", 1: "1 device"}.get(there, f"{there} devices")
        raise SbkitError(
            f"`device` must be one that is there, but is {device.type}:{index} where "
            f"{'torch sees' if count is count_here else 'the target has'} {number} of that type. "
            "Use --device=cpu, or fewer processes."
        )
    return torch.device(device.type) if device.type == "mps" else torch.device(device.type, index)

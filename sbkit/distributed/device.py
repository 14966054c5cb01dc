"""The device and precision of a run, parsed once; only the device's type reaches autocast."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.amp.grad_scaler import GradScaler

from sbkit.base.errors import ConfigError, DeviceError
from sbkit.base.machine import why_no_cuda

DeviceCounter = Callable[[str], int]  # counts the devices of a type

DEVICE_FORMS = "cpu, cuda, cuda:N, mps, xpu or xpu:N"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS_BY_DEVICE_TYPE = {  # keyed by device type; fp16 needs a GradScaler, and is for GPUs
    "cpu": ("fp32", "bf16"),
    "cuda": ("fp32", "bf16", "fp16"),
    "mps": ("fp32", "bf16"),
    "xpu": ("fp32", "bf16", "fp16"),
}


@dataclass(frozen=True)
class Placement:
    """The device and precision (fp32, bf16 or fp16) of a model, a supported pair.

    >>> Placement(torch.device("cpu"), "bf16")
    Placement(device=device(type='cpu'), precision='bf16')
    """

    device: torch.device
    precision: str

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new autocast context for the precision; for fp32 it does nothing."""
        is_mixed = self.precision != "fp32"
        return torch.autocast(self.device.type, DTYPES[self.precision], enabled=is_mixed)

    def grad_scaler(self) -> GradScaler:
        """Return a new GradScaler, which does nothing except in fp16."""
        return GradScaler(self.device.type, enabled=self.precision == "fp16")


ON_CPU = Placement(torch.device("cpu"), "fp32")


def count_local_devices(device_type: str) -> int:
    """Count the devices of a type that torch finds on this machine."""
    if device_type == "cpu":
        return 1
    backend = torch.get_device_module(device_type)
    return int(backend.device_count()) if backend.is_available() else 0


def device_counter_for(target: str | None) -> DeviceCounter:
    """Return a counter for another machine: `cuda:8` has eight such devices, `cpu` has no GPU.

    None stands for this machine.
    """
    if target is None:
        return count_local_devices
    device = parse_device(target, key="--target")
    count = 1 if device.index is None else device.index
    if count == 0:  # a user may mean the first GPU, and the check would silently be for the CPU
        raise ConfigError(f"`--target` has no device. Write --target={device.type}:1, or cpu.")
    return lambda device_type: count if device_type == device.type else int(device_type == "cpu")


def resolve_placement(
    device: str | torch.device | None,
    precision: str,
    *,
    count: DeviceCounter = count_local_devices,
) -> Placement:
    """Check a declared device and precision against the machine whose devices ``count`` counts.

    None takes the first GPU, or the CPU if there is none. Under torchrun, `cuda` and `xpu` without
    an index mean the device of the local rank.
    """
    parsed = choose_device(device, count)
    check_precision(parsed.type, precision)
    return Placement(find_device(parsed, count), precision)


def choose_device(
    device: str | torch.device | None, count: DeviceCounter = count_local_devices
) -> torch.device:
    """Parse a declared device; for None, take the GPU, or the CPU if there is none."""
    if device is None:
        device = "cuda" if count("cuda") else "cpu"
    return parse_device(device)


def parse_device(device: str | torch.device, *, key: str = "device") -> torch.device:
    """Parse a device in one of `DEVICE_FORMS`."""
    if isinstance(device, torch.device) and device.type in PRECISIONS_BY_DEVICE_TYPE:
        return device
    text = str(device)
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:(0|[1-9]\d?))?", text, re.ASCII):
        raise ConfigError(f"`{key}` must be {DEVICE_FORMS}, but is {device!r}.")
    return torch.device(text)


def check_precision(device_type: str, precision: str, *, key: str = "precision") -> None:
    """Check that a device type supports a precision."""
    if precision not in [*DTYPES]:  # a list, since the value may not be hashable
        raise ConfigError(f"`{key}` must be one of {', '.join(DTYPES)}, but is {precision!r}.")
    supported = PRECISIONS_BY_DEVICE_TYPE[device_type]
    if precision not in supported:
        raise DeviceError(
            f"`{key}` on {device_type} must be one of {', '.join(supported)}, but is {precision}."
        )


def find_device(device: torch.device, count: DeviceCounter = count_local_devices) -> torch.device:
    """Return an existing device with its index, which is the local rank if it is not declared."""
    if device.type == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index not in (None, local_rank) and local_ranks > 1:
        raise ConfigError(
            f"`device` is {device}, but torchrun starts {local_ranks} processes. Write "
            f"`device: {device.type}`."
        )
    index = local_rank if device.index is None else device.index
    if index >= (num_devices := count(device.type)):
        machine = "torch finds" if count is count_local_devices else "the target has"
        devices = {0: "no device", 1: "1 device"}.get(num_devices, f"{num_devices} devices")
        is_cuda_here = device.type == "cuda" and not num_devices and count is count_local_devices
        reason = f", because {why_no_cuda('torch')}" if is_cuda_here else ""
        raise DeviceError(
            f"`device` is {device.type}:{index}, but {machine} {devices} of that type{reason}."
        )
    return torch.device(device.type) if device.type == "mps" else torch.device(device.type, index)

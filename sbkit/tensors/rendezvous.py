"""How the processes of a run find one another, and what is said when one does not come."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sbkit.values.errors import SbkitError

PATIENCE = "SBKIT_RENDEZVOUS_SECONDS"
# Once together, a rank may wait for hours while another prepares the data; who hangs in training is
# found by its heartbeat.
TOGETHER = timedelta(hours=24)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # objects travel by the CPU


@dataclass(frozen=True)
class Place:
    """What torchrun says of a process."""

    rank: int
    world_size: int
    local_rank: int


def read_place(environment: Mapping[str, str]) -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK.

    Raises SbkitError when they do not make sense, or the address to meet at is missing.
    """
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, "0" if name == "LOCAL_RANK" else "")
        if not (text.isascii() and text.isdecimal()):
            raise _refusal(f"{name} must be a whole number", f"is {text!r}")
        numbers[name] = int(text)
    place = Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])
    if place.rank >= place.world_size:
        raise _refusal(f"RANK must be below WORLD_SIZE ({place.world_size})", f"is {place.rank}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise _refusal(f"{name} must say where the processes meet", "is not set")
    return place


def join(device: torch.device) -> None:
    """Meet the other processes and form a group with them.

    Raises SbkitError when they do not all come in time.
    """
    place = read_place(os.environ)
    _leave_with_parent()
    patience = timedelta(seconds=_patience(os.environ))
    try:
        _reach_host(place, patience.total_seconds())
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=patience))
        store.set_timeout(patience)
        store.set(f"sbkit/{place.rank}", "here")
        store.wait([f"sbkit/{rank}" for rank in range(place.world_size)], patience)
    except (OSError, RuntimeError, ValueError) as error:
        raise SbkitError(
            f"All {place.world_size} processes must meet at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {patience.seconds} s, but rank {place.rank} "
            f"waited in vain ({_first_line(error)}). Start the same command on every node, let the "
            f"port through, or raise {PATIENCE}."
        ) from error
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=TOGETHER,
        device_id=None if device.type == "cpu" else device,
    )


def _leave_with_parent() -> None:
    """Be asked to stop when torchrun's agent dies: killed, it would leave its ranks training on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _reach_host(place: Place, patience: float) -> None:
    """Wait until somebody listens; torch would print its own stack for every attempt.

    Raises OSError when nobody does.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        socket.getaddrinfo(host, port)  # it will listen there itself
        return
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _patience(environment: Mapping[str, str]) -> float:
    text = environment.get(PATIENCE, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 86_400:
        raise _refusal(f"{PATIENCE} must be seconds from 1 to 86399", f"is {text!r}")
    return seconds


def _refusal(must: str, came: str) -> SbkitError:
    return SbkitError(
        f"{must}, but {came}. Let torchrun set it: torchrun --nproc_per_node=N train.py ..., or "
        "unset RANK for a single process."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].removesuffix(".")

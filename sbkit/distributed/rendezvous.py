"""How the processes of a run find one another, and the error where one does not come."""

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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from sbkit.base.errors import SbkitError

TIMEOUT = "SBKIT_RENDEZVOUS_SECONDS"
# Once together, a rank may wait for hours while another prepares the data; a rank that hangs in
# training is found by its heartbeat.
TOGETHER = timedelta(hours=24)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # objects travel by the CPU
LOOK_AGAIN = 0.1  # seconds


@dataclass(frozen=True)
class Place:
    """A process as torchrun describes it, and where the processes meet."""

    rank: int
    world_size: int
    host: str
    port: int


def is_single_process(environment: Mapping[str, str]) -> bool:
    """Return whether nothing says that this is one process of several."""
    single = {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return "RANK" not in environment and single.items() <= {**single, **environment}.items()


def read_place(environment: Mapping[str, str]) -> Place:
    """Read RANK, WORLD_SIZE and where to meet; raises SbkitError where they are not set."""
    rank, world_size, port = (
        read_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if not environment.get("MASTER_ADDR"):
        raise _error("MASTER_ADDR must say where the processes meet", "is not set")
    return Place(rank, world_size, environment["MASTER_ADDR"], port)


def read_number(environment: Mapping[str, str], name: str, *, default: str = "") -> int:
    """Read a whole number that torchrun sets; raises SbkitError where it is not one."""
    text = environment.get(name, default)
    if not text.isdecimal():
        raise _error(f"{name} must be a whole number", f"is {text!r}")
    return int(text)


def join(device: torch.device) -> Store:
    """Meet the other processes, form a group with them, and return the store that they met in.

    Raises SbkitError when they do not all come in time.
    """
    place = read_place(os.environ)
    _stop_with_parent()
    seconds = float(os.environ.get(TIMEOUT, "120"))
    end = time.monotonic() + seconds
    try:
        _reach_host(place, end)
        store = _open_store(place, seconds)
        _meet(store, place, end)
        _form_group(store, place, device, seconds)
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split()).removesuffix(".")
        raise SbkitError(
            f"All {place.world_size} processes must meet at {place.host}:{place.port} within "
            f"{seconds:g} s, but rank {place.rank} waited in vain ({why}). Start "
            f"the same command on every node, let the port through, or raise {TIMEOUT}."
        ) from error
    return store


def _stop_with_parent() -> None:
    """Ask for SIGTERM when torchrun's agent dies: killed, it would leave its ranks training on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _reach_host(place: Place, end: float) -> None:
    """Wait until the host listens; torch would print its own stack for every attempt.

    Raises OSError where it does not.
    """
    while not _is_host(place):
        try:
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(LOOK_AGAIN)


def _is_host(place: Place) -> bool:
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _open_store(place: Place, seconds: float) -> Store:
    """Open the store, one's own or the host's, without what an earlier attempt left in it.

    torchrun keeps its store when it starts ranks again, and with it the addresses of those that
    died (pytorch #135712). The agents of several nodes count their restarts each by itself, so that
    the number is of use where there is one agent only.
    """
    is_only_agent = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_only_agent else "0"
    store = TCPStore(
        place.host,
        place.port,
        is_master=_is_host(place),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore(f"sbkit/{attempt}", store)


def _meet(store: Store, place: Place, end: float) -> None:
    """Wait for every rank, in Python, where signals are handled.

    Raises SbkitError where they do not agree on how many they are, TimeoutError when one is late.
    """
    store.set(f"here/{place.rank}", str(place.world_size))
    for rank in range(place.world_size):
        while not store.check([f"here/{rank}"]):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} has not come")
            time.sleep(LOOK_AGAIN)
        theirs = store.get(f"here/{rank}").decode()
        if theirs != str(place.world_size):
            raise _error(
                "WORLD_SIZE must be the same for all processes",
                f"is {theirs} for rank {rank} and {place.world_size} for rank {place.rank}",
            )


def _form_group(store: Store, place: Place, device: torch.device, seconds: float) -> None:
    """Form the group within the same time: a rank that has met may have died since."""
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=seconds),
        device_id=None if device.type == "cpu" else device,
    )
    if dist.group.WORLD is not None:
        dist.group.WORLD.set_timeout(TOGETHER)


def _error(must: str, came: str) -> SbkitError:
    return SbkitError(
        f"{must}, but {came}. Let torchrun set it: torchrun --nproc_per_node=N train.py ..., or "
        "unset RANK, WORLD_SIZE and LOCAL_RANK for a single process."
    )

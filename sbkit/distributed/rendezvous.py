"""How the processes of a run find one another, and what is said when one does not come."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from sbkit.base.errors import SbkitError

PATIENCE = "SBKIT_RENDEZVOUS_SECONDS"
# Once together, a rank may wait for hours while another prepares the data; who hangs in training is
# found by its heartbeat.
TOGETHER = timedelta(hours=24)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # objects travel by the CPU
T = TypeVar("T")
MOST_DIGITS = 6  # of a number that says which process this is
LOOK_AGAIN = 0.1  # seconds
LAST_WORD = 1.0  # seconds for torch to say itself that it has waited for long enough


@dataclass(frozen=True)
class Place:
    """What torchrun says of a process, and where the processes meet."""

    rank: int
    world_size: int
    host: str
    port: int


def is_alone(environment: Mapping[str, str]) -> bool:
    """Return whether nothing says that this is one process of several."""
    one = {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    others = {name for name, text in one.items() if environment.get(name, text) != text}
    return "RANK" not in environment and not others


def read_place(environment: Mapping[str, str]) -> Place:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and where to meet; raises SbkitError for nonsense."""
    rank, world_size = (read_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= world_size:
        raise _refusal(f"RANK must be below WORLD_SIZE ({world_size})", f"is {rank}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise _refusal(f"{name} must say where the processes meet", "is not set")
    port = read_number(environment, "MASTER_PORT")
    if port >= 1 << 16:
        raise _refusal("MASTER_PORT must be below 65536", f"is {port}")
    read_number(environment, "LOCAL_RANK", default="0")  # `find_device` takes it
    return Place(rank, world_size, environment["MASTER_ADDR"], port)


def read_number(environment: Mapping[str, str], name: str, *, default: str = "") -> int:
    """Read a whole number that torchrun sets.

    Raises SbkitError when it is not one, or no count of processes.
    """
    text = environment.get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise _refusal(f"{name} must be a whole number", f"is {text!r}")
    if len(text) > MOST_DIGITS:
        raise _refusal(f"{name} must have at most {MOST_DIGITS} digits", f"is {text:.20}")
    return int(text)


def join(device: torch.device) -> Store:
    """Meet the other processes and form a group with them; give the store that they met in.

    Raises SbkitError when they do not all come in time.
    """
    place = read_place(os.environ)
    _leave_with_parent()
    patience = _patience(os.environ)
    end = time.monotonic() + patience
    try:
        _reach_host(place, end)
        store = _within(patience, lambda: _open_store(place, patience))
        _meet(store, place, end)
        _within(patience, lambda: _form_group(store, place, device, patience))
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split()).removesuffix(".")
        raise SbkitError(
            f"All {place.world_size} processes must meet at {place.host}:{place.port} within "
            f"{patience:g} s, but rank {place.rank} waited in vain ({why}). Start "
            f"the same command on every node, let the port through, or raise {PATIENCE}."
        ) from error
    return store


def _leave_with_parent() -> None:
    """Ask for SIGTERM when torchrun's agent dies: killed, it would leave its ranks training on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _reach_host(place: Place, end: float) -> None:
    """Wait until somebody listens; torch would print its own stack for every attempt.

    Raises OSError when nobody does.
    """
    if _is_host(place):
        socket.getaddrinfo(place.host, place.port)  # it will listen there itself
        return
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(LOOK_AGAIN)


def _is_host(place: Place) -> bool:
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _open_store(place: Place, patience: float) -> Store:
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
        timeout=timedelta(seconds=patience),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore(f"sbkit/{attempt}", store)


def _meet(store: Store, place: Place, end: float) -> None:
    """Wait for every rank, in Python, which hears signals the while.

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
            raise _refusal(
                "WORLD_SIZE must be the same for all processes",
                f"is {theirs} for rank {rank} and {place.world_size} for rank {place.rank}",
            )


def _form_group(store: Store, place: Place, device: torch.device, patience: float) -> None:
    """Form the group with the patience of the meeting: one that has met may have died since."""
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=patience),
        device_id=None if device.type == "cpu" else device,
    )
    if dist.group.WORLD is not None:
        dist.group.WORLD.set_timeout(TOGETHER)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Wait for torch in Python, where signals are heard, and no longer than said.

    Where something else listens, or an address leads to nobody, torch itself waits on.
    Raises TimeoutError then.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    Thread(target=work, name="rendezvous", daemon=True).start()
    try:
        return result.result(seconds + LAST_WORD)
    except TimeoutError as error:
        raise TimeoutError(str(error) or "nothing answers") from error


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
        "unset RANK, WORLD_SIZE and LOCAL_RANK for a single process."
    )

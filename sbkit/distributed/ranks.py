"""Ranks: how they meet, how many there are, and the collective operations on them."""

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.process import OTHER_RANKS_DELAY, exit_code
from sbkit.base.torch_internals import abort_process_group

TIMEOUT = "SBKIT_RENDEZVOUS_SECONDS"
# Once together, a rank may wait for hours while another prepares the data; a rank that hangs in
# training is found by its heartbeat.
TOGETHER = timedelta(hours=24)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # objects travel by the CPU
LOOK_AGAIN = 0.1  # seconds

_is_single = False
_store: Store | None = None  # where the processes have met
_turns = 0  # of the main rank that the others have waited for


def rank() -> int:
    """Return this process's rank; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() and not _is_single else 0


def world_size() -> int:
    """Count the processes of the run."""
    return dist.get_world_size() if dist.is_initialized() and not _is_single else 1


@contextmanager
def single_rank() -> Iterator[None]:
    """Let this rank be the only one inside, while the others wait for it elsewhere."""
    global _is_single
    before, _is_single = _is_single, True
    try:
        yield
    finally:
        _is_single = before


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join torchrun's other processes, if there are any, and leave the group at the end.

    After an error the group is aborted: NCCL would wait for ranks that never come.
    """
    global _store
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    # Imported before there is a group: its functions keep the group of their import as a default
    # argument (and DDP imports it), so gloo's threads would outlive the group and race with the
    # interpreter's end: "terminate called without an active exception", now and then.
    import_module("torch.distributed.nn")

    leave: Callable[[], object] = dist.destroy_process_group
    _store = _join(device)
    try:
        yield
    except (Exception, KeyboardInterrupt):  # not where all leave: one may still be saving
        leave = abort_process_group
        raise
    finally:
        _take_group_from_reducers()
        gc.collect()  # what is in a cycle would hold the group too
        _store = None
        leave()


def _join(device: torch.device) -> Store:
    """Meet the other processes, form a group with them, and return the store that they met in.

    Raises SbkitError when they do not all come in time.
    """
    if sys.platform == "linux":  # a killed agent of torchrun would leave its ranks training on
        set_parent_death_signal = 1  # of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    seconds = float(os.environ.get(TIMEOUT, "120"))
    timeout = timedelta(seconds=seconds)
    try:
        store: Store
        store, number, count = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            BACKENDS.get(device.type, "gloo"),
            store=store,
            rank=number,
            world_size=count,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except (OSError, RuntimeError, ValueError) as error:
        rank, host, port = map(os.environ.get, ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        why = " ".join(str(error).split()).removesuffix(".")
        raise SbkitError(
            f"All processes of a run must meet at {host}:{port} within {seconds:g} s, but rank "
            f"{rank} did not meet them ({why}). Start the same command by torchrun on every node, "
            f"let the port through, or raise {TIMEOUT}."
        ) from error
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(TOGETHER)
    return store


def _take_group_from_reducers() -> None:
    """Drop every reducer before the group, whatever frame or traceback still holds it.

    It would end the group while it holds Python's lock, for which gloo's threads may be waiting
    with a lock that it needs: one in twenty of such processes never ended on a busy machine.
    """
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel):
            each.reducer = each.logger = each.process_group = None


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Run something on rank 0 first, so that the others find it done.

    Where it fails, rank 0 prints the error and the others exit silently with the same code; else
    they would wait, and end with a traceback about a broken connection.
    """
    if rank() > 0:
        _wait_for_main_rank()
        code = gather_over_ranks(None)[0]
        if code is not None:
            raise SystemExit(code)
        yield
        return
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # asked to stop too, others may have left already
            _wait_for_main_rank()
            _gather(exit_code(error))
        raise
    _wait_for_main_rank()
    gather_over_ranks(None)


def _wait_for_main_rank() -> None:
    """Wait until rank 0 comes here, in Python, where signals are handled; gloo would block them."""
    global _turns
    if world_size() == 1 or _store is None:
        return
    turn, _turns = f"turn/{_turns}", _turns + 1
    if rank() == 0:
        _store.set(turn, "")
    with _asked_like_others():
        while not _store.check([turn]):
            time.sleep(LOOK_AGAIN)


@contextmanager
def _asked_like_others() -> Iterator[None]:
    """Where another rank has left, give the launcher time to ask this one to stop, too.

    The other one closes its connections, waits for OTHER_RANKS_DELAY, prints its error, and ends.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(2 * OTHER_RANKS_DELAY)
        raise


@_asked_like_others()
def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add a tensor up over all ranks, in place; the host does not wait for it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@_asked_like_others()
def from_main_rank(tensor: Tensor) -> Tensor:
    """Copy rank 0's values of a tensor of any type to all ranks, in place."""
    if world_size() > 1:
        # As bytes: gloo lacks some types.
        content = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(content, 0)
        tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))
    return tensor


@_asked_like_others()
def any_rank(value: bool) -> bool:
    """Return, on every rank, whether ``value`` is true on any; no device is waited for."""
    if world_size() == 1:
        return value
    count = torch.tensor(int(value))  # travels by the CPU
    dist.all_reduce(count)
    return bool(count)


@_asked_like_others()
def gather_over_ranks(value: Any) -> list[Any]:
    """Collect one picklable object from every rank, on every rank, in the order of the ranks."""
    return _gather(value)


def leave_together(error: Exception | None) -> None:
    """Stop all ranks where any has an error: that one raises it, and the others exit silently."""
    if any(gather_over_ranks(error is not None)):
        raise error or SystemExit(BAD_INPUT)


def _gather(value: Any) -> list[Any]:
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values

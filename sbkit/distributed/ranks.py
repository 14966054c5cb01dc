"""The ranks of a run: their process group, and collective operations."""

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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from sbkit.base.errors import DeviceError, OtherRankError, StopRequestedError
from sbkit.base.process import OTHER_RANKS_DELAY, exit_code
from sbkit.base.torch_internals import abort_process_group

TIMEOUT_VARIABLE = "SBKIT_RENDEZVOUS_SECONDS"
# A rank may wait for hours while another prepares the data. In training, heartbeats show whether a
# rank hangs.
GROUP_TIMEOUT = timedelta(hours=24)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # gloo sends objects
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # a launcher sets them
POLL_SECONDS = 0.1  # between two checks on another rank

T = TypeVar("T")


class Ranks:
    """The processes of a run, as this one sees them."""

    def __init__(self) -> None:
        self.is_single = False
        self.store: Store | None = None  # where the ranks met
        self.num_turns = 0  # how often the ranks have waited for rank 0


RANKS = Ranks()  # torch.distributed has one group for the process, too


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() and not RANKS.is_single else 0


def world_size() -> int:
    """Count the processes of the run."""
    return dist.get_world_size() if dist.is_initialized() and not RANKS.is_single else 1


@contextmanager
def as_single_process() -> Iterator[None]:
    """Let this rank act as a run of one process, while the others wait for it."""
    was_single, RANKS.is_single = RANKS.is_single, True
    try:
        yield
    finally:
        RANKS.is_single = was_single


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the other processes of torchrun, if any, and leave the group at the end.

    After an error the group is aborted: NCCL would wait for ranks that never come.
    """
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        # The step's tasks, not the job's.
        if (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
            raise DeviceError(
                f"srun gives its {tasks} tasks no ranks. On one node, run srun --ntasks=1 torchrun "
                f"--nproc_per_node={tasks} train.py YAML; on more, sbatch tools/launch/slurm.sh "
                "YAML. For a run of its own in each task, unset SLURM_STEP_NUM_TASKS."
            )
        yield
        return
    # DDP imports this module, whose functions take the current group as a default argument. If it
    # were imported later, gloo's threads would outlive the group and race with the interpreter's
    # end: now and then, "terminate called without an active exception".
    import_module("torch.distributed.nn")

    leave: Callable[[], object] = dist.destroy_process_group
    RANKS.store = _join(device)
    try:
        yield
    except (OtherRankError, StopRequestedError):  # another rank may still be saving
        raise
    except (Exception, KeyboardInterrupt):
        leave = abort_process_group
        raise
    finally:
        gc.collect()  # cycles may hold the group
        RANKS.store = None
        leave()


def _join(device: torch.device) -> Store:
    """Form a group with the other processes, and return the store of the rendezvous."""
    missing = [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)]
    if missing:
        leftover = " ".join(name for name in LAUNCHER_VARIABLES if name in os.environ)
        raise DeviceError(
            f"Several processes need {', '.join(missing)} as well as {leftover}. Start them with "
            f"torchrun. For a single process: unset {leftover}"
        )
    if sys.platform == "linux":  # otherwise the ranks of a killed torchrun agent train on
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, "120"))
    timeout = timedelta(seconds=seconds)
    try:
        store: Store
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            BACKENDS.get(device.type, "gloo"),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except (OSError, RuntimeError, ValueError) as error:
        name, host, port = map(os.environ.get, ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        reason = " ".join(str(error).split()).removesuffix(".")
        raise DeviceError(
            f"Rank {name} did not meet the other processes at {host}:{port} within {seconds:g} s "
            f"({reason}). Open the port, or raise {TIMEOUT_VARIABLE}. For a single process: unset "
            f"{' '.join(LAUNCHER_VARIABLES)}"
        ) from error
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(GROUP_TIMEOUT)
    return store


def drop_reducer(module: Any) -> None:
    """Drop the reducer of a DistributedDataParallel before the group ends; a frame may hold both.

    A reducer that outlives its group ends some runs with SIGABRT. A reducer that ends the group
    itself holds Python's lock, and gloo's threads may wait for it: 1 of 20 such processes hung.
    """
    module.reducer = module.logger = module.process_group = None


@contextmanager
def rank0_then_others() -> Iterator[None]:
    """Run the body on rank 0 first, so that the others find its results.

    If it fails, rank 0 raises its error, and the others OtherRankError, which no command prints.
    """
    if rank() > 0:
        _wait_for_rank0()
        code = gather_over_ranks(None)[0]
        if code is not None:
            raise OtherRankError(code)
        yield
        return
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # other ranks may have been stopped, and have left already
            _wait_for_rank0()
            _gather(exit_code(error))
        raise
    _wait_for_rank0()
    gather_over_ranks(None)


def _wait_for_rank0() -> None:
    """Wait for rank 0 in Python, which handles signals; gloo would block them."""
    store = RANKS.store
    if world_size() == 1 or store is None:
        return
    turn = f"turn/{RANKS.num_turns}"
    RANKS.num_turns += 1
    if rank() == 0:
        store.set(turn, "")
    with _stopped_like_others():
        while not store.check([turn]):
            time.sleep(POLL_SECONDS)


@contextmanager
def _stopped_like_others() -> Iterator[None]:
    """If another rank has left, give the launcher time to stop this one as well.

    A rank that fails closes its connections, waits `OTHER_RANKS_DELAY`, prints its error and ends.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(2 * OTHER_RANKS_DELAY)
        raise


@_stopped_like_others()
def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place; the host does not wait for the result."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@_stopped_like_others()
def copy_from_rank0(tensor: Tensor) -> Tensor:
    """Copy rank 0's values of a tensor of any type to all ranks, in place."""
    if world_size() > 1:
        # As bytes, since gloo lacks some dtypes
        content = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(content, 0)
        tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))
    return tensor


@_stopped_like_others()
def gather_over_ranks(value: T) -> list[T]:
    """Return the picklable objects of all ranks, in their order, on every rank."""
    return _gather(value)


@_stopped_like_others()
def gather_on_rank0(value: T) -> list[T]:
    """Return the objects of all ranks on rank 0, and on any other rank only its own object."""
    values = [value] * (world_size() if rank() == 0 else 1)
    if world_size() > 1:
        dist.gather_object(value, values if rank() == 0 else None)
    return values


@contextmanager
def raise_on_all_ranks(errors: type[Exception]) -> Iterator[None]:
    """Stop all ranks if one raises such an error; the others then raise OtherRankError."""
    own_error: Exception | None = None
    try:
        yield
    except errors as error:
        own_error = error
    codes = gather_over_ranks(None if own_error is None else exit_code(own_error))
    if code := next(filter(None, codes), None):
        raise own_error or OtherRankError(code)


def _gather(value: T) -> list[T]:
    if world_size() == 1:
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values

"""Ranks meet within a time limit, exchange values, and end together after an error."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from sbkit.base.errors import BAD_INPUT, DeviceError
from sbkit.distributed.ranks import process_group
from tests import processes

TWO_RANKS = """
import json, sys, time
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
from sbkit.base.errors import OtherRankError
from sbkit.distributed.ranks import *

folder = Path(sys.argv[1])
seen = {}
with process_group(torch.device("cpu")):
    me = rank()
    with rank0_then_others():
        if me == 0:
            time.sleep(0.2)
            (folder / "built").touch()
        seen["found"] = (folder / "built").exists()
    try:
        with rank0_then_others():
            raise ValueError
    except ValueError:
        seen["left"] = "with its error"
    except OtherRankError as silent:
        seen["left"] = silent.exit_code
    seen["ranks"] = gather_over_ranks([me, world_size()])
    seen["for the first"] = gather_on_rank0(me)
    seen["sum"] = sum_over_ranks(torch.tensor([me + 1.0, 10.0])).tolist()
    module = DistributedDataParallel(torch.nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    drop_reducer(module)
# `module` is still referenced, as by a frame: it must not hold the group or gloo's threads.
tasks = Path("/proc/self/task").glob("*/comm")
seen["threads"] = [name for task in tasks if "gloo" in (name := task.read_text().strip())]
seen["alone"] = [rank(), world_size()]
(folder / f"{me}.json").write_text(json.dumps(seen))
"""


def test_tasks_of_srun_without_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")  # of a job, whose script is one process
    with process_group(torch.device("cpu")):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(DeviceError, match="srun --ntasks=1 torchrun --nproc_per_node=2"):
        process_group(torch.device("cpu")).__enter__()


@pytest.mark.ddp
def test_two_ranks_wait_fail_gather_and_sum(tmp_path: Path) -> None:
    process = processes.run(["-c", TWO_RANKS, tmp_path], ranks=2)
    assert process.returncode == 0, process.stderr
    common = {"found": True, "ranks": [[0, 2], [1, 2]], "sum": [3.0, 20.0]}
    common |= {"alone": [0, 1], "threads": []}
    first, second = (json.loads((tmp_path / f"{me}.json").read_text()) for me in (0, 1))
    assert first == {**common, "left": "with its error", "for the first": [0, 1]}
    # In silence, with the code of the first
    assert second == {**common, "left": 1, "for the first": [1]}


# -- rendezvous ------------------------------------------------------------------------------

JOIN = """
import os, time
import torch
from sbkit.distributed.ranks import gather_over_ranks, process_group
from sbkit.base.process import run_main

def main():
    with process_group(torch.device("cpu")):
        time.sleep(float(os.environ.get("LATE", "0")))
        gather_over_ranks(None)

run_main(main)
"""

Start = Callable[..., processes.Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that joins the rendezvous; kill it at the end."""
    port = str(processes.free_port())
    with ExitStack() as stack:

        def start(*, seconds: float = 1, **variables: str) -> processes.Process:
            common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            # One node each: only the first process of a node prints errors.
            common |= {"LOCAL_RANK": "0", "SBKIT_RENDEZVOUS_SECONDS": str(seconds)}
            process = processes.Process(["-c", JOIN], **{**common, **variables})
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "phrases"),
    [
        ({"RANK": "0"}, ["Rank 0 did not meet", "at 127.0.0.1:", "1/2 clients joined"]),
        ({"RANK": "1", "MASTER_ADDR": ""}, ["need MASTER_ADDR", "unset RANK WORLD_SIZE"]),
    ],
    ids=str,
)
def test_incomplete_rendezvous(variables: dict[str, str], phrases: list[str], start: Start) -> None:
    process = start(**variables)
    _, error = process.communicate(timeout=240)
    assert process.returncode == BAD_INPUT, error
    assert "Traceback" not in error
    assert all(phrase in error.splitlines()[-1] for phrase in phrases), error


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_wait_longer_after_the_rendezvous(start: Start) -> None:
    members = [start(seconds=6, RANK=str(rank), LATE=str(7 * rank)) for rank in (0, 1)]
    for process in members:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error

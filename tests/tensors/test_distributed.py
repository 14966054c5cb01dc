"""Ranks: alone everything is quiet, together they agree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sbkit.tensors.distributed import (
    barrier,
    gather_over_ranks,
    main_rank_first,
    process_group,
    rank,
    sum_over_ranks,
    world_size,
)

TWO_RANKS = """
import sys, time
from pathlib import Path
import torch
from sbkit.tensors.distributed import *

built = Path(sys.argv[1])
with process_group(torch.device("cpu")):
    with main_rank_first():
        if rank() == 0:
            time.sleep(0.2)
            built.touch()
        found = built.exists()
    barrier()
    shared = gather_over_ranks({"rank": rank(), "found": found})
    total = sum_over_ranks(torch.tensor([rank() + 1.0, 10.0])).tolist()
    print(world_size(), shared, total, flush=True)
print("left", rank(), world_size(), flush=True)
"""


def test_alone_there_is_one_rank_and_nothing_to_wait_for() -> None:
    with process_group(torch.device("cpu")), main_rank_first():
        barrier()
        assert (rank(), world_size()) == (0, 1)
        assert gather_over_ranks("one") == ["one"]
        tensor = torch.ones(2)
        assert sum_over_ranks(tensor) is tensor
        assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.ddp
def test_two_ranks_wait_share_and_add(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py"), str(tmp_path / "built")],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    together = "2 [{'rank': 0, 'found': True}, {'rank': 1, 'found': True}] [3.0, 20.0]"
    assert sorted(done.stdout.splitlines()) == [together, together, "left 0 1", "left 0 1"]

"""Ranks agree on their buffers, of whatever type, before these are used in common or saved."""

import json

import pytest

from tests import processes

TWO_RANKS = """
import json
import torch
from torch import nn
from sbkit.distributed.ranks import gather_over_ranks, process_group, rank
from sbkit.train.model_state import agree_on_buffers

with process_group(torch.device("cpu")):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    mine = float(rank() + 1)
    model[0].running_mean.fill_(mine)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    for number, kind in enumerate(kinds):
        model[1].register_buffer(f"b{number}", torch.full((2, 3), mine - 1).to(kind).T)
    model[1].register_buffer("empty", torch.zeros(0))
    model[1].register_buffer("count", torch.tensor(rank() + 7))
    agree_on_buffers(model)
    ours = {name: str(each.tolist()) for name, each in model.named_buffers()}
    everyone = gather_over_ranks(ours)
    if rank() == 0:
        print(json.dumps(everyone))
"""


@pytest.mark.ddp
def test_statistics_are_averaged_and_all_others_are_those_of_rank_0() -> None:
    done = processes.run(["-c", TWO_RANKS], ranks=2)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second
    assert first["0.running_mean"] == "[1.5, 1.5]"
    assert first["1.count"] == "7"
    assert first["1.b0"] == first["1.b1"] == "[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]"
    assert first["1.b3"] == "[[False, False], [False, False], [False, False]]"

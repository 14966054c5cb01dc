"""What two ranks add up is what one process computes alone."""

import json

import pytest
import torch
from torch import nn

from sbkit.train.optimizer_step import normalize_by_tokens
from tests import processes

SHARES = [[3, 1], [7, 2, 5]]  # labels of each utterance, by rank: unequal in number and in size
TWO_RANKS = f"""
import json
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from sbkit.train.optimizer_step import clip, normalize_by_tokens
from sbkit.train.metrics import Meter
from sbkit.models.loss import Loss
from sbkit.distributed.ranks import gather_over_ranks, process_group, rank

def main():
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")):
        torch.manual_seed(rank())  # DDP copies the weights of rank 0
        model = DistributedDataParallel(nn.Linear(4, 1))
        counts = torch.tensor({SHARES}[rank()])
        inputs = torch.arange(4.0) + 10 * rank() + torch.arange(len(counts)).unsqueeze(1)
        meter = Meter(torch.device("cpu"))

        def lose(rows):
            sums = model(inputs[rows]).squeeze(1).square() * counts[rows]
            meter.add(Loss(sums, counts[rows]), 0.75)
            return sums.sum()

        with model.no_sync():
            lose(slice(0, 1)).backward()
        lose(slice(1, None)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        normalize_by_tokens([optimizer], torch.stack([counts.sum(), torch.tensor(0)]))
        grads = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
        norm = clip(optimizer, 1.0).item()
        read = meter.read()
        shared = gather_over_ranks([grads, norm, read.loss_sum, read.labels, read.audio_seconds])
        if rank() == 0:
            print(json.dumps(shared))

main()
"""


@pytest.mark.ddp
def test_gradient_norm_and_figures_are_those_of_one_process() -> None:
    done = processes.run(["-c", TWO_RANKS], ranks=2, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    counts = torch.tensor([count for share in SHARES for count in share])
    rows = [[10 * rank + row for row in range(len(share))] for rank, share in enumerate(SHARES)]
    inputs = torch.arange(4.0) + torch.tensor([start for share in rows for start in share])[:, None]
    sums = model(inputs).squeeze(1).square() * counts
    sums.sum().backward()
    tally = torch.stack([counts.sum(), torch.tensor(0)])
    normalize_by_tokens([torch.optim.SGD(model.parameters(), lr=0.1)], tally)
    grads, norm, loss_sum, labels, audio_seconds = first
    wanted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for grad, alone in zip(grads, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(grad), alone.flatten())
    assert norm == pytest.approx(float(torch.cat([each.flatten() for each in wanted]).norm()))
    assert loss_sum == pytest.approx(float(sums.detach().sum()))
    assert (labels, audio_seconds) == (18, 3.0)

"""On two ranks, which leave out other layers: every parameter takes part in DDP's all-reduce."""

import json

import pytest
import torch

from tests import processes
from tests.models.pretrained.sharing import Step, gradients

pytestmark = [pytest.mark.slow, pytest.mark.ddp]


def test_layers_are_left_out_without_a_search_for_unused_parameters() -> None:
    done = processes.run(["-m", "tests.models.pretrained.sharing"], ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    for kind, shared in json.loads(done.stdout).items():
        both = [gradients(Step(kind), seed) for seed in (0, 10)]
        learning = [each for each in Step(kind).parameters() if each.requires_grad]
        assert len(shared) == len(both[0]) == len(learning)
        for one, other, together in zip(*both, shared, strict=True):
            mean = (torch.tensor(one) + torch.tensor(other)) / 2
            torch.testing.assert_close(torch.tensor(together), mean, rtol=1e-4, atol=1e-4)

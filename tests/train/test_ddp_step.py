"""On two ranks: parts of a model that take turns.

`torchrun -m tests.train.test_ddp_step` trains it; with the argument `used`, the run declares that
every rank uses all parts; with `outside`, the second language has a layer outside the modules.
"""

import json
import re
import sys
from typing import Any

import pytest
import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sbkit.distributed.ranks import process_group, rank, world_size
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain
from tests import processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

STEPS = 6


class TurnsBrain(Brain):
    """A shared body, a head for each language, one that joins in step 2, and one never used."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """Score the rows, each by its language's head: (B, 4), (B,) -> (B,)."""
        inputs, languages = batch
        states = self.modules["body"](inputs)
        scores = [
            self.modules[f"head{language}"](states[languages == language]).squeeze(1)
            for language in languages.unique().tolist()
        ]
        if self.hparams.outside is not None and 1 in languages:  # on one rank only
            scores[-1] = scores[-1] + self.hparams.outside(states[languages == 1]).squeeze(1)
        joined = self.optimizer_step >= 1
        return torch.cat(scores) + (self.modules["late"](states).sum(1) if joined else 0)

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Loss:
        return Loss(predictions.square(), torch.ones_like(predictions))


def train(kind: str = "") -> dict[str, list[float]]:
    """Return the parameters after a few steps; each of two ranks has rows of one language."""
    torch.manual_seed(0)
    modules = {"body": nn.Linear(4, 5)}
    modules |= {name: nn.Linear(5, 1) for name in ("head0", "head1", "late", "off")}
    rows, languages = torch.randn(STEPS, 6, 4), torch.arange(6).div(3, rounding_mode="floor")
    mine = slice(None) if world_size() == 1 else slice(3 * rank(), 3 * rank() + 3)
    batches = [(step[mine], languages[mine]) for step in rows]
    # Weight decay tells a gradient of zero from none: AdamW steps only with the former.
    brain = TurnsBrain(
        modules=modules,
        opt_class=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
        hparams={"outside": nn.Linear(5, 1) if kind == "outside" else None},
        run_opts={
            **{"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": 2},
            "find_unused_parameters": kind != "used",
        },
    )
    brain.fit(range(1), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    parameters = brain.modules.named_parameters()
    return {name: parameter.flatten().tolist() for name, parameter in parameters}


def test_ddp_step_with_parts_taking_turns_equals_one_process() -> None:
    process = processes.run(["-m", "tests.train.test_ddp_step"], ranks=2)
    assert (process.returncode, process.stderr) == (0, "")
    shared, alone = json.loads(process.stdout), train()
    assert shared.keys() == alone.keys()
    for name, values in alone.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_ddp_step_names_unused_parameters_in_the_same_step() -> None:
    process = processes.run(["-m", "tests.train.test_ddp_step", "used"], ranks=2)
    assert process.returncode != 0
    assert re.search("head[01].weight, head[01].bias, late.* had no gradient", process.stderr)


def test_ranks_stop_together_for_a_layer_outside_the_modules() -> None:
    process = processes.run(["-m", "tests.train.test_ddp_step", "outside"], ranks=2)
    assert process.returncode != 0
    assert process.stderr.count("but `hparams.outside.weight` (1, 5)") == 1  # by one of them


if __name__ == "__main__":
    with process_group(torch.device("cpu")):
        trained = train(*sys.argv[1:])
        if rank() == 0:
            json.dump(trained, sys.stdout)

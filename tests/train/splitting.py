"""Train with less memory than batches need: `torchrun -m tests.train.splitting`, or in one process.

Memory is pretended: a part fails where a batch has more utterances than fit.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sbkit.audio.augment import SpeedGroup
from sbkit.base.errors import SbkitError
from sbkit.data.batches.batch import Batch
from sbkit.distributed.ranks import gather_over_ranks, process_group, rank, world_size
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain

STEPS, UTTERANCES = 4, 8  # of a batch over all ranks
WIDTH = 100_000  # of a layer that DDP sends in buckets of its own, from the second step on
ACCUMULATIONS = (1, 2)
SPARED = 3  # batches: all but the last, whose step is not the first and is DDP's


class _Breaking(torch.autograd.Function):
    """End memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise torch.OutOfMemoryError("pretended")


class Limited(nn.Module):
    """Let at most so many utterances through, in one of the passes, after ``spared`` of them."""

    def __init__(self, most: int, where: str, spared: int) -> None:
        super().__init__()
        self.most, self.where, self.spared = most, where, spared

    def forward(self, inputs: Tensor) -> Tensor:
        """Pass (B, D) on, or fail."""
        self.spared -= 1
        if len(inputs) <= self.most or self.spared >= 0:
            return inputs
        if self.where == "forward":
            raise torch.OutOfMemoryError("pretended")
        broken: Tensor = _Breaking.apply(inputs)  # type: ignore[no-untyped-call]
        return broken


class LimitedBrain(Brain):
    """Score utterances by their sound, in two layers with a limit between them."""

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        """Return the score of each: (B, S) -> (B,)."""
        sound = batch.audio.float()
        inputs = torch.stack([sound.sum(1), sound.square().sum(1)], 1)
        states = self.modules["limit"](self.modules["body"](inputs))
        return self.modules["head"](states).square().mean(1)

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Stage) -> Loss:
        """Lose the scores, by the length of each."""
        return Loss(predictions * batch.weights, batch.audio_lengths * batch.weights)


def make_batches() -> Iterator[Batch]:
    """Make this rank's batches; every utterance is longer than the one before."""
    torch.manual_seed(0)
    for step in range(STEPS):
        lengths = torch.arange(1, UTTERANCES + 1) + step
        inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        audio = torch.randint(-3, 4, inside.shape).to(torch.int16) * inside
        whole = Batch(
            ids=[f"clip{step}-{number}" for number in range(UTTERANCES)],
            columns={},
            audio=audio,
            audio_lengths=lengths,
            weights=torch.ones(UTTERANCES, dtype=torch.int64),
            speed_groups=(SpeedGroup(100, UTTERANCES, int(lengths.max())),),
            seconds=1.0,
        )
        share = UTTERANCES // world_size()
        yield whole.take(slice(rank() * share, (rank() + 1) * share))


def make_brain(
    most: int, where: str = "forward", *, spared: int = 0, **options: Any
) -> LimitedBrain:
    """Make a Brain in memory that ends."""
    torch.manual_seed(0)
    modules = {
        "body": nn.Linear(2, 3),
        "limit": Limited(most, where, spared),
        "head": nn.Linear(3, WIDTH),
    }
    return LimitedBrain(
        modules=modules,
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        hparams={"stall_seconds": 0},  # which it says it has no folder for
        run_opts={"device": "cpu", "noprogressbar": True, **options},
    )


def train(
    most: int, where: str, accumulation: int, *, spared: int = 0, searches: bool = False
) -> dict[str, float]:
    """Return what the parameters add up to after a few steps, and the mean loss."""
    options = {"grad_accumulation_factor": accumulation, "find_unused_parameters": searches}
    brain = make_brain(most, where, spared=spared, **options)
    losses = []
    brain.on_stage_end = lambda stage, loss, epoch=None: losses.append(loss)
    brain.fit(range(1), DataLoader(list(make_batches()), batch_size=None))  # type: ignore[arg-type]
    parameters = brain.modules.named_parameters()
    sums = {name: float(each.detach().double().square().sum()) for name, each in parameters}
    return sums | {f"loss{number}": loss for number, loss in enumerate(losses)}


def main() -> None:
    """Train with memory that ends on rank 1 alone; then where a single utterance does not fit."""
    with process_group(torch.device("cpu")):
        most = 1 if rank() == 1 else UTTERANCES
        found = [
            train(most, where, accumulation, spared=spared, searches=searches)
            for where, spared, searches in (
                ("forward", 0, False),
                ("backward", SPARED, False),
                ("backward", SPARED, True),
            )
            for accumulation in ACCUMULATIONS
        ]
        try:
            train(0 if rank() == 1 else UTTERANCES, "backward", 1)
        except SbkitError as error:
            said = str(error)
        everyone = gather_over_ranks((found, said))
        if rank() == 0:
            json.dump(everyone, sys.stdout)


if __name__ == "__main__":
    main()

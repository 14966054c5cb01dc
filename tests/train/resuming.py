"""Stop and go on with SpeechBrain's loaders: `torchrun -m tests.train.resuming FOLDER`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter
from torch import Tensor, nn

from sbkit.distributed.ranks import gather_over_ranks, process_group
from sbkit.train.brain import Brain

ROWS, EPOCHS = 16, 2  # two rows a batch, by two ranks: four steps an epoch


class HeardBrain(Brain):
    """Fit a line, and note whom it has heard."""

    heard: list[str]
    stop_at: int | None = None

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """Score the rows."""
        outputs: Tensor = self.modules["line"](batch.x.data)
        return outputs

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        """Lose the squares."""
        return predictions.square().mean()

    def on_fit_batch_end(self, batch: Any, *_: Any) -> None:
        """Note the batch, and ask this rank to stop."""
        self.heard.extend(batch.id)
        if len(self.heard) == 2 * (self.stop_at or 0):
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: Path, stop_at: int | None = None) -> tuple[list[str], list[list[float]]]:
    """Train from wherever the folder stands; give whom this rank heard, and the parameters."""
    torch.manual_seed(0)
    rows = {str(n): {"x": torch.randn(3)} for n in range(ROWS)}
    line, counter = nn.Linear(3, 1), EpochCounter(EPOCHS)
    brain = HeardBrain(
        modules={"line": line},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hparams={"sorting": "random"},
        checkpointer=Checkpointer(folder, {"line": line, "counter": counter}),
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    brain.heard, brain.stop_at = [], stop_at
    try:
        dataset = DynamicItemDataset(rows, output_keys=["id", "x"])
        brain.fit(counter, dataset, train_loader_kwargs={"batch_size": 2, "shuffle": True})
    except SystemExit:
        assert stop_at is not None
    return brain.heard, [each.tolist() for each in line.parameters()]


def compare(folder: Path, stop_at: int) -> dict[str, Any]:
    """Train whole, and stopped and gone on; give both."""
    whole = train(folder / f"whole-{stop_at}")
    before, _ = train(folder / f"stopped-{stop_at}", stop_at)
    after, parameters = train(folder / f"stopped-{stop_at}")
    return {"whole": whole, "stopped": (before + after, parameters)}


if __name__ == "__main__":
    with process_group(torch.device("cpu")):
        told = gather_over_ranks([compare(Path(sys.argv[1]), stop_at) for stop_at in (2, 4)])
        if os.environ["RANK"] == "0":
            json.dump(told, sys.stdout)

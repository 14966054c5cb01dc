"""Several optimizers take part in the one exact step, and a Brain without metrics has a run."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import AveragedCheckpoints, Checkpointer
from sbkit.logs.run_log import read_log
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain
from sbkit.train.optimizers import assign_parameters
from sbkit.train.step import match_losses
from tests import processes
from tests.processes import Process
from tests.runs import Workplace, last_parameters, read_json
from tests.train.adversarial import parameters, write_yaml

CLOCK = ("rtfx", "waiting")
EPOCHS = "--number_of_epochs=4"


class Pair(Brain):
    """A generator, and a discriminator that judges what it makes."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        generated = self.modules["generator"](batch)
        return self.modules["discriminator"](generated), self.modules["discriminator"](batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        fake, real = predictions
        ones = torch.ones(len(batch))
        return {
            "discriminator": Loss((real - 1).square().sum(1) + fake.square().sum(1), ones),
            "generator": Loss((fake - 1).square().sum(1), 2 * ones),
        }


class SpoiledPair(Pair):
    """A pair whose discriminator's loss is not finite."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        losses = super().compute_objectives(predictions, batch, stage)
        loss = losses["discriminator"]
        return {**losses, "discriminator": Loss(loss.sums / 0, loss.counts)}


def pair(kind: type[Pair] = Pair, **options: Any) -> Pair:
    """Make a Brain whose optimizers are declared in another order than its losses."""
    torch.manual_seed(0)
    return kind(
        modules={"generator": nn.Linear(3, 3), "discriminator": nn.Linear(3, 1)},
        hparams={
            "optimizers": {
                "generator": {"parts": ["generator"], "opt_class": lambda p: SGD(p, lr=0.1)},
                "discriminator": {"opt_class": lambda p: SGD(p, lr=0.2)},
            }
        },
        run_opts={"device": "cpu", "noprogressbar": True, "max_grad_norm": -1, **options},
    )


def fit(brain: Pair, rows: int = 8, *, size: int = 8, batch: torch.Tensor | None = None) -> None:
    torch.manual_seed(1)
    data = torch.randn(rows, 3) if batch is None else batch
    brain.fit([1], torch.utils.data.DataLoader(list(data), batch_size=size))  # type: ignore[arg-type]


def moves(brain: Pair, before: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """Return by how much the parameters of each module have moved."""
    return {
        name: [b - a.detach() for a, b in zip(module.parameters(), before[name], strict=True)]
        for name, module in brain.modules.items()
    }


def expected_gradients(brain: Pair) -> dict[str, list[torch.Tensor]]:
    torch.manual_seed(1)
    batch = torch.randn(8, 3)
    losses = brain.compute_objectives(brain.compute_forward(batch, None), batch, None)
    return {
        name: [
            *torch.autograd.grad(
                losses[name].sums.sum() / losses[name].counts.sum(),
                [*brain.modules[name].parameters()],
                retain_graph=True,
            )
        ]
        for name in brain.modules
    }


@pytest.mark.parametrize(("accumulation", "unlimited"), [(1, -1.0), (4, 0.0)])
def test_each_optimizer_steps_its_parts_by_its_own_loss(
    accumulation: int, unlimited: float
) -> None:
    brain = pair(grad_accumulation_factor=accumulation, max_grad_norm=unlimited)
    before = {name: parameters(module) for name, module in brain.modules.items()}
    expected = expected_gradients(brain)
    fit(brain, size=8 // accumulation)
    moved = moves(brain, before)
    for name, rate in (("generator", 0.1), ("discriminator", 0.2)):
        for step, gradient in zip(moved[name], expected[name], strict=True):
            torch.testing.assert_close(step, rate * gradient)


def test_each_optimizer_is_clipped_by_its_own_norm() -> None:
    brain = pair(max_grad_norm=0.01)
    before = {name: parameters(module) for name, module in brain.modules.items()}
    fit(brain)
    for (_, moved), rate in zip(moves(brain, before).items(), (0.1, 0.2), strict=True):
        norm = torch.cat([difference.flatten() for difference in moved]).norm()
        torch.testing.assert_close(norm, torch.tensor(rate * 0.01), rtol=1e-3, atol=0.0)


def test_optimizers_skip_a_step_together() -> None:
    brain = pair(kind=SpoiledPair, nonfinite_patience=9)
    before = {name: parameters(module) for name, module in brain.modules.items()}
    fit(brain)
    assert not any(
        difference.any() for moved in moves(brain, before).values() for difference in moved
    )
    assert brain.nonfinite_count == 1


def test_single_loss_moves_all_optimizers() -> None:
    class Alone(Pair):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return predictions[0].square().mean()

    torch.manual_seed(0)
    brain = Alone(
        modules={"generator": nn.Linear(3, 3), "discriminator": nn.Linear(3, 1)},
        hparams={
            "optimizers": {
                "matrices": {"parts": ["*.weight"], "opt_class": Muon},
                "rest": {"opt_class": AdamW},
            }
        },
        run_opts={"device": "cpu", "noprogressbar": True, "remove_vector_weight_decay": True},
    )
    before = {name: parameters(module) for name, module in brain.modules.items()}
    fit(brain)
    assert all(difference.any() for moved in moves(brain, before).values() for difference in moved)
    kinds: dict[str, Optimizer] = brain.optimizers_dict
    assert [type(difference) for difference in kinds.values()] == [Muon, AdamW]
    decays = [group["weight_decay"] for group in kinds["rest"].param_groups]
    assert decays == [0.0, 0.01]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"a": {"parts": ["body"]}}, "but head.bias, head.weight are in none"),
        ({"a": {"parts": ["body"]}, "b": {"parts": ["*"]}}, "`body.weight` is in a and in b"),
        ({"a": {"parts": ["bodies"]}, "b": {}}, "there is no `bodies`"),
        ({"a": {}, "b": {}}, "a, b have no `parts`"),
    ],
)
def test_parameter_in_two_optimizers_is_refused(declared: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 1)})
    named = dict(sorted(model.named_parameters()))
    with pytest.raises(SbkitError, match=message.replace("*", r"\*")):
        assign_parameters(declared, named)


def test_loss_with_unknown_name_is_refused() -> None:
    losses = {"generator": torch.ones(()), "critic": torch.ones(())}
    with pytest.raises(
        SbkitError, match=r"\(generator, discriminator\), but returned generator, c"
    ):
        match_losses(losses, ["generator", "discriminator"])


# -- runs of train.py ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_yaml(tmp_path_factory.mktemp("yaml"))


def command(workplace: Workplace, yaml: Path, run: Path, *options: str) -> list[str]:
    folders = (f"--data_folder={workplace.release}", f"--output_folder={run}")
    plain = ("--device=cpu", "--batch_seconds=6", "--log_every=1", "--check=false")
    return ["train.py", str(yaml), *folders, *plain, "--average_checkpoints=2", EPOCHS, *options]


def start(workplace: Workplace, yaml: Path, run: Path) -> Process:
    return Process(command(workplace, yaml, run), SBKIT_CACHE=workplace.cache)


@pytest.fixture(scope="module")
def whole(workplace: Workplace, yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole")
    process = start(workplace, yaml, run)
    assert process.wait(120) == 0, process.output()
    return run


def records(run: Path) -> list[dict[str, Any]]:
    logged = read_log(run / "train_log.jsonl")
    return [{name: v for name, v in record.items() if name not in CLOCK} for record in logged]


@pytest.mark.slow
def test_run_without_metrics_ranks_checkpoints_by_loss(whole: Path) -> None:
    epochs = [record for record in records(whole) if record["kind"] == "epoch"]
    losses = [record["valid_loss"] for record in epochs]
    assert len(losses) == 4
    checkpoints = Checkpointer(whole / "checkpoints").find_checkpoints(min_key="loss")
    assert sorted(losses)[0] == min(record.meta["loss"] for record in checkpoints)
    averaged = AveragedCheckpoints.read(whole / "checkpoints")
    assert averaged is not None and len(averaged.of) == 2
    tested = read_json(whole / "summary.json")["test"]["test"]
    assert tested["loss"] > 0
    assert (whole / "report.html").is_file() and (whole / "curves.png").is_file()


@pytest.mark.slow
def test_run_killed_at_random_steps_equals_uninterrupted_run(
    workplace: Workplace, yaml: Path, whole: Path, tmp_path: Path
) -> None:
    """Weights, the state of both optimizers, and every figure are the same, bit for bit."""
    dice, steps = random.Random(0), len([e for e in records(whole) if e["kind"] == "step"])
    for lines in sorted(dice.sample(range(1, steps + 3), 3)):
        process = start(workplace, yaml, tmp_path)
        while process.poll() is None and len(records(tmp_path)) < lines:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    process = start(workplace, yaml, tmp_path)
    assert process.wait(120) == 0, process.output()
    assert records(tmp_path) == records(whole)
    files = ("model.ckpt", "optimizer_generator.ckpt", "optimizer_discriminator.ckpt")
    last = [Checkpointer(folder / "checkpoints").find_checkpoint() for folder in (tmp_path, whole)]
    for name in files:
        mine, theirs = ((folder.path / name).read_bytes() for folder in last if folder)
        assert mine == theirs


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_equal_one(workplace: Workplace, yaml: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        words = command(workplace, yaml, tmp_path / str(ranks), "--dropout=0.0")
        process = processes.run(words, ranks=ranks, SBKIT_CACHE=workplace.cache)
        assert process.returncode == 0, process.stderr
    alone, shared = (last_parameters(tmp_path / str(ranks)) for ranks in (1, 2))
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-6)
    figures = [
        [e["loss"] for e in records(tmp_path / str(ranks)) if "loss" in e] for ranks in (1, 2)
    ]
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)

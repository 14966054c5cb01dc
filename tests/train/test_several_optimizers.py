"""Several optimizers share one exact step, and a Brain without metrics has a run."""

import random
import signal
import time
from collections.abc import Iterable
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
from tests.processes import Process
from tests.runs import Workplace, read_json
from tests.train.adversarial import write_yaml

CLOCK = ("rtfx", "data_wait_share")
SHORT = ("--device=cpu", "--batch_seconds=6", "--log_every=1", "--check=false")
SHORT += ("--average_checkpoints=2", "--number_of_epochs=4")


class Pair(Brain):
    """A generator, and a discriminator of its output."""

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


RATES = {"generator": 0.1, "discriminator": 0.2}
OPTIMIZERS = {  # in another order than the losses
    "generator": {"parts": ["generator"], "opt_class": lambda p: SGD(p, lr=RATES["generator"])},
    "discriminator": {"opt_class": lambda p: SGD(p, lr=RATES["discriminator"])},
}


def pair(
    kind: type[Pair] = Pair, optimizers: dict[str, dict[str, Any]] = OPTIMIZERS, **options: Any
) -> Pair:
    torch.manual_seed(0)
    return kind(
        modules={"generator": nn.Linear(3, 3), "discriminator": nn.Linear(3, 1)},
        hparams={"optimizers": optimizers},
        run_opts={"device": "cpu", "noprogressbar": True, "max_grad_norm": -1, **options},
    )


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 3)


def moves_of_fit(brain: Pair, *, size: int = 8) -> dict[str, torch.Tensor]:
    """Train, and return by how much the parameters of each module move."""
    before = {name: flat(module.parameters()) for name, module in brain.modules.items()}
    brain.fit([1], torch.utils.data.DataLoader(list(rows()), batch_size=size))  # type: ignore[arg-type]
    return {
        name: before[name] - flat(module.parameters()) for name, module in brain.modules.items()
    }


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def expected_gradients(brain: Pair) -> dict[str, torch.Tensor]:
    batch = rows()
    losses = brain.compute_objectives(brain.compute_forward(batch, None), batch, None)
    return {
        name: flat(
            torch.autograd.grad(
                losses[name].sums.sum() / losses[name].counts.sum(),
                [*brain.modules[name].parameters()],
                retain_graph=True,
            )
        )
        for name in brain.modules
    }


@pytest.mark.parametrize(("accumulation", "unlimited"), [(1, -1.0), (4, 0.0)])
def test_each_optimizer_steps_its_parts_by_its_own_loss(
    accumulation: int, unlimited: float
) -> None:
    brain = pair(grad_accumulation_factor=accumulation, max_grad_norm=unlimited)
    expected = expected_gradients(brain)
    moves = moves_of_fit(brain, size=8 // accumulation)
    for name, rate in RATES.items():
        torch.testing.assert_close(moves[name], rate * expected[name])


def test_each_optimizer_is_clipped_by_its_own_norm() -> None:
    for name, move in moves_of_fit(pair(max_grad_norm=0.01)).items():
        assert float(move.norm()) == pytest.approx(RATES[name] * 0.01, rel=1e-3)


def test_optimizers_skip_a_step_together() -> None:
    brain = pair(kind=SpoiledPair, nonfinite_patience=9)
    assert not flat(moves_of_fit(brain).values()).any()
    assert brain.nonfinite_count == 1


def test_single_loss_moves_all_optimizers() -> None:
    class Alone(Pair):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            return predictions[0].square().mean()

    declared = {
        "matrices": {"parts": ["*.weight"], "opt_class": Muon},
        "rest": {"opt_class": AdamW},
    }
    brain = pair(Alone, declared, remove_vector_weight_decay=True)
    assert flat(moves_of_fit(brain).values()).all()
    optimizers: dict[str, Optimizer] = brain.optimizers_dict
    assert [type(optimizer) for optimizer in optimizers.values()] == [Muon, AdamW]
    decays = [group["weight_decay"] for group in optimizers["rest"].param_groups]
    assert decays == [0.0, 0.01]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"a": {"parts": ["body"]}}, "but head.bias, head.weight are in none"),
        ({"a": {"parts": ["body"]}, "b": {"parts": ["*"]}}, "`body.weight` is in a and in b"),
        ({"a": {"parts": ["bodies"]}, "b": {}}, "there is no `bodies`"),
        ({"a": {}, "b": {}}, "The optimizer b has nothing to step"),
        ({"a": {"parts": ["*"]}, "b": {}}, "The optimizer b has nothing to step"),
    ],
)
def test_parts_that_do_not_divide_the_parameters_are_refused(
    declared: dict[str, Any], message: str
) -> None:
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
    return ["train.py", *workplace.arguments(run, *options, yaml=str(yaml), tiny=SHORT)]


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
    losses = [record["valid_loss"] for record in records(whole) if record["kind"] == "epoch"]
    assert len(losses) == 4
    checkpoints = Checkpointer(whole / "checkpoints").find_checkpoints(min_key="loss")
    assert min(losses) == min(checkpoint.meta["loss"] for checkpoint in checkpoints)
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
    num_steps = len([record for record in records(whole) if record["kind"] == "step"])
    for lines in sorted(random.Random(0).sample(range(1, num_steps + 3), 3)):
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
    alone, shared = workplace.parameters_by_ranks(
        tmp_path, "--dropout=0.0", yaml=str(yaml), tiny=SHORT
    )
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-6)
    losses = [[r["loss"] for r in records(tmp_path / ranks) if "loss" in r] for ranks in "12"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

"""What SpeechBrain lets a recipe read, call, declare and override means the same here."""

import json
from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
import torch
from speechbrain import Stage
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.train.brain import Brain
from sbkit.train.run_options import INSTEAD_OF_PRIVATE, PRIVATE_HOOKS
from tests import processes
from tests.train.lines import MeanBrain, batches, brain_of


def test_option_without_effect_is_refused() -> None:
    for options in ({"profile_training": True}, {"hparams": {"profile_training": True}}):
        with pytest.raises(SbkitError, match="`profile_training` must be off"):
            brain_of(**options)


@pytest.mark.parametrize(("debug_epochs", "epochs"), [(1, 1), (2, 2), (-1, 3)])
def test_debug_stops_after_batches_or_epochs(debug_epochs: int, epochs: int) -> None:
    brain = brain_of(debug=True, debug_batches=1, debug_epochs=debug_epochs)
    brain.fit([1, 2, 3], batches(4))
    assert brain.optimizer_step == epochs


def test_debug_evaluates_same_number_of_batches_of_every_split(tmp_path: Path) -> None:
    """Also after the checkpoints to average have been validated."""
    model = nn.Linear(3, 2)
    checkpointer = Checkpointer(tmp_path, recoverables={"model": model})
    options = {"debug": True, "debug_batches": 2, "debug_epochs": 2, "debug_persistently": True}
    hparams = {"average_checkpoints": 2}
    brain = MeanBrain({"model": model}, torch.optim.SGD, hparams, options, checkpointer)
    brain.fit([1, 2], batches(4), {"a": batches(4), "b": batches(4)})
    brain.evaluate({"c": batches(4), "d": batches(4)})
    assert [len(losses) for losses in brain.evaluator.results.values()] == [2, 2]
    assert brain.step == 0


def test_ckpt_interval_steps_counts_optimizer_steps(tmp_path: Path) -> None:
    """Unlike in SpeechBrain, where it counts micro-batches: gradients are not saved."""
    saved = []

    class Saving(Checkpointer):
        def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            saved.append(brain.step)

    options = {"grad_accumulation_factor": 2, "ckpt_interval_steps": 2}
    brain = brain_of(checkpointer=Saving(tmp_path), **options)
    brain.fit([1, 2], batches(10))
    assert saved == [4, 8, 4, 8]


class Watching(MeanBrain):
    """Read what a recipe may read."""

    seen: list[float]

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        self.seen.append(self.avg_train_loss)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage is Stage.TRAIN:
            assert stage_loss == self.avg_train_loss


def test_mean_training_loss_is_public() -> None:
    brain = brain_of(Watching, lr=0.0, hparams={"log_every": 1})
    brain.seen = []
    brain.fit([1, 2], batches(3))
    losses = [float(brain.evaluate_batch(batch, Stage.TRAIN)) for batch in batches(3)]
    means = [0.0, losses[0], (losses[0] + losses[1]) / 2]
    assert brain.seen == pytest.approx([*means, *means])


REFUSED_HPARAMS = {
    "freeze": True,
    "lr_scale": 0.5,
    "lr_schedule": sb.nnet.schedulers.LinearScheduler(0.1, 0.01, 2),
}


@pytest.mark.parametrize("name", REFUSED_HPARAMS)
def test_option_with_other_meaning_than_speechbrain_is_refused(name: str) -> None:
    with pytest.raises(SbkitError, match=rf"`{name}`.* (must be|needs) .*another name"):
        brain_of(hparams={name: REFUSED_HPARAMS[name], "lr": 0.1})


PRIVATE = {name for name in vars(sb.Brain) if name.startswith("_") and name[:2] != "__"}


@pytest.mark.parametrize(
    "name", ["update_average", "check_gradients", *sorted(PRIVATE - {*PRIVATE_HOOKS})]
)
def test_overriding_a_hook_that_is_never_called_is_refused(name: str) -> None:
    overriding = type("Overriding", (MeanBrain,), {name: lambda self, *_: None})
    with pytest.raises(SbkitError, match=rf"`{name}` of Overriding is never called\. [A-Z]\w+ "):
        brain_of(overriding)


def test_brain_overrides_the_private_methods_that_recipes_do() -> None:
    assert {*vars(Brain)} & PRIVATE == {"_fit_valid", "_compile", "_wrap_distributed"}
    assert {*PRIVATE_HOOKS, *INSTEAD_OF_PRIVATE} <= PRIVATE


class Thawing(MeanBrain):
    """Freeze the optimizer for the first two of three steps."""

    def freeze_optimizers(self, optimizers: dict[str, Any]) -> dict[str, Any]:
        return optimizers if self.step >= 3 else {"other": self.other}


def test_thawed_optimizer_has_no_gradient_from_frozen_steps() -> None:
    brain = brain_of(Thawing, lr=1.0, max_grad_norm=-1)
    model, (*_, last) = brain.modules.model, batches(3)
    brain.other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    loss = nn.functional.mse_loss(model(last[0]), last[1])
    expected = model.weight.detach() - torch.autograd.grad(loss, model.weight)[0]
    brain.fit([1], batches(3))
    torch.testing.assert_close(model.weight.detach(), expected)


def test_nonfinite_losses_are_counted_and_stop_the_run() -> None:
    class Checking(MeanBrain):
        def fit_batch(self, batch: Any) -> torch.Tensor:
            loss = torch.tensor(float("nan"))
            self.check_loss_isfinite(loss)
            return loss

    brain = brain_of(Checking, nonfinite_patience=2)
    brain.fit([1, 2, 3], batches(2))
    with pytest.raises(ValueError, match="patience"):
        brain.fit([4], batches(3))


TWO_RANKS = """
import json
import torch
import torch.distributed as dist
import speechbrain as sb
from torch import nn
from sbkit.train.brain import Brain
from sbkit.distributed.ranks import gather_over_ranks, process_group, rank

def trained(base, kind):
    class Plain(base):
        seen = 0

        def compute_forward(self, batch, stage):
            self.seen += 1
            return self.modules.second(self.modules.first(batch[0]))

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.mse_loss(predictions, batch[1])

    class Own(Plain):
        def fit_batch(self, batch):
            should_step = self.step % self.grad_accumulation_factor == 0
            with self.no_sync(not should_step):
                outputs = self.compute_forward(batch, sb.Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
                (loss / self.grad_accumulation_factor).backward()
            if should_step:
                self.optimizers_step()
            return loss.detach().cpu()

    torch.manual_seed(0)
    modules = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)}
    rows = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
    options = {"device": "cpu", "distributed_backend": "gloo", "grad_accumulation_factor": 2}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    brain = (Plain if kind == "plain" else Own)(modules, optimizer, {}, options)
    batch_size = {"batch_size": 2}
    brain.fit([1, 2], rows, None, False, batch_size)
    assert base is sb.Brain or brain.modules["first"] is modules["first"]
    weights = [p.flatten().tolist() for part in modules.values() for p in part.parameters()]
    return brain.seen, sum(weights, [])

def main():
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")):
        results = [trained(base, kind) for kind in ("own", "plain") for base in (Brain, sb.Brain)]
        by_rank = gather_over_ranks(results)
        if rank() == 0:
            print(json.dumps(by_rank))

main()
"""


@pytest.mark.ddp
def test_gradients_are_averaged_over_processes_like_speechbrain() -> None:
    process = processes.run(["-c", TWO_RANKS], ranks=2)
    assert process.returncode == 0, process.stderr
    one, two = json.loads(process.stdout.splitlines()[-1])
    own, expected, plain, wanted_plain = one
    assert own == expected
    assert plain[0] == wanted_plain[0] == 8  # each batch is seen once
    assert plain[1] == pytest.approx(wanted_plain[1], rel=1e-6)
    assert two[:3] == one[:3]

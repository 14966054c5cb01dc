"""A SpeechBrain recipe moves over by another base class, and comes to the same numbers."""

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import speechbrain as sb
import torch
from speechbrain import Stage

import sbkit
from tests.runs import Workplace, one_thread
from tests.speechbrain_recipe import load_recipe, make_asr, run

pytestmark = pytest.mark.slow

Kind = type[sb.Brain]
EXACT = 1e-6  # relative


@dataclass
class Trace:
    """What a run went through, and where it came to."""

    losses: list[float] = field(default_factory=list)  # of every batch, as the recipe computes it
    rates: list[float] = field(default_factory=list)  # after every batch
    stages: list[float] = field(default_factory=list)  # mean losses
    heard: list[Any] = field(default_factory=list)  # hypotheses and WER of every evaluation
    parameters: list[torch.Tensor] = field(default_factory=list)


def traced(asr: Kind, trace: Trace, *, stop_at: int | None = None) -> Kind:
    """Watch a recipe from outside; stop it in the batch of that number, as Ctrl-C would."""

    class Traced(asr):  # type: ignore[misc, valid-type]
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            loss = super().compute_objectives(predictions, batch, stage)
            if stage is Stage.TRAIN:
                if len(trace.losses) == stop_at:
                    raise KeyboardInterrupt
                trace.losses.append(loss.item())
            return loss

        def on_fit_batch_end(self, *arguments: Any) -> None:
            super().on_fit_batch_end(*arguments)
            trace.rates += [each.param_groups[0]["lr"] for each in self.optimizers_dict.values()]

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            super().on_stage_end(stage, stage_loss, epoch)
            trace.stages.append(stage_loss)
            if stage is not Stage.TRAIN:
                trace.heard += [each["hyp_tokens"] for each in self.wer_metric.scores]
                trace.heard.append(self.wer_metric.summarize("WER"))
            trace.parameters = [each.detach().clone() for each in self.modules.parameters()]

    return Traced


def assert_alike(trace: Trace, other: Trace) -> None:
    assert trace.losses == pytest.approx(other.losses, rel=EXACT)
    assert trace.rates == pytest.approx(other.rates, rel=EXACT)
    assert trace.stages == pytest.approx(other.stages, rel=EXACT)
    assert trace.heard == other.heard
    for one, two in zip(trace.parameters, other.parameters, strict=True):
        torch.testing.assert_close(one, two, rtol=EXACT, atol=EXACT * float(two.abs().max()))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def train(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """Run the recipe over a Brain, in a new folder or one that was stopped."""

    def train(
        base: Kind,
        *,
        vary: Callable[[Kind], Kind] = lambda asr: asr,
        stop_at: int | None = None,
        folder: Path | None = None,
        fit: Mapping[str, Any] = MappingProxyType({}),
        **run_opts: Any,
    ) -> Trace:
        output = folder or tmp_path_factory.mktemp("run")
        hparams = load_recipe(workplace.release, output)
        trace = Trace()
        asr = traced(vary(make_asr(base)), trace, stop_at=stop_at)
        try:
            run(asr, hparams, run_opts, **copy.deepcopy(dict(fit)))
        except KeyboardInterrupt:
            assert stop_at is not None
        return trace

    return train


@pytest.fixture(scope="module")
def whole(train: Callable[..., Trace]) -> Trace:
    """A run that nothing stops."""
    return train(sbkit.Brain)


def test_recipe_trains_equally_under_both_brains(train: Callable[..., Trace], whole: Trace) -> None:
    wanted = train(sb.Brain)
    assert len(wanted.losses) == 3 * 12
    assert len(wanted.stages) == 3 * 2 + 1
    assert len(set(wanted.rates)) == 3 * 12
    assert any(heard != [] for heard in wanted.heard[:4])
    assert_alike(whole, wanted)


def test_recipe_stopped_within_an_epoch_resumes_exactly(
    train: Callable[..., Trace], whole: Trace, tmp_path: Path
) -> None:
    stopped, rest = (
        train(sbkit.Brain, folder=tmp_path, stop_at=stop_at, ckpt_interval_steps=1)
        for stop_at in (18, None)
    )
    assert stopped.losses + rest.losses == whole.losses
    assert rest.stages == whole.stages[2:]
    assert rest.heard[-5:] == whole.heard[-5:]
    assert all(map(torch.equal, rest.parameters, whole.parameters))


def test_run_of_speechbrain_resumes_under_sbkit(
    train: Callable[..., Trace], tmp_path: Path
) -> None:
    train(sb.Brain, folder=tmp_path / "one", stop_at=14)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ended = train(sbkit.Brain, folder=tmp_path / "one")
    assert_alike(ended, train(sb.Brain, folder=tmp_path / "two"))


def own_step(asr: Kind) -> Kind:
    """As in SpeechBrain's recipes with mixed precision."""

    class OwnStep(asr):  # type: ignore[misc, valid-type]
        def fit_batch(self, batch: Any) -> Any:
            should_step = self.step % self.grad_accumulation_factor == 0
            with self.no_sync(not should_step):
                with self.training_ctx:
                    outputs = self.compute_forward(batch, Stage.TRAIN)
                    loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
                scaled_loss = self.scaler.scale(loss / self.grad_accumulation_factor)
                self.check_loss_isfinite(scaled_loss)
                scaled_loss.backward()
            if should_step:
                self.optimizers_step()
            self.on_fit_batch_end(batch, outputs, loss, should_step)
            return loss.detach().cpu()

    return OwnStep


def one_of_two_frozen(asr: Kind) -> Kind:
    """Step one of two optimizers, as recipes on pretrained encoders do."""

    class TwoOptimizers(asr):  # type: ignore[misc, valid-type]
        def init_optimizers(self) -> None:
            self.encoder_optimizer = self.opt_class(self.modules.encoder.parameters())
            self.ctc_optimizer = self.opt_class(self.modules.ctc_lin.parameters())
            self.optimizers_dict = {"ctc": self.ctc_optimizer, "encoder": self.encoder_optimizer}
            self.checkpointer.add_recoverable("ctc_optimizer", self.ctc_optimizer)
            self.checkpointer.add_recoverable("encoder_optimizer", self.encoder_optimizer)

        def freeze_optimizers(self, optimizers: dict[str, Any]) -> dict[str, Any]:
            return {"ctc": optimizers["ctc"]}

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
            self.hparams.lr_annealing(self.ctc_optimizer)

    return TwoOptimizers


LOOPED = {"batch_size": 4, "looped_nominal_epoch": 3}
A_FEW_BATCHES = {"debug": True, "debug_batches": 6, "debug_epochs": 2, "debug_persistently": True}
VARIATIONS: dict[str, dict[str, Any]] = {
    "accumulates": {"vary": own_step, "grad_accumulation_factor": 4, **A_FEW_BATCHES},
    "freezes": {"vary": one_of_two_frozen, "max_grad_norm": 0.5, **A_FEW_BATCHES},
    "shuffles": {"fit": {"train_loader_kwargs": {"batch_size": 5, "shuffle": True}}},
    "loops": {"fit": {"train_loader_kwargs": LOOPED, "epoch_counter": [1, 2]}},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_recipe_overrides_behave_as_in_speechbrain(train: Callable[..., Trace], name: str) -> None:
    trace, wanted = (train(each, **VARIATIONS[name]) for each in (sbkit.Brain, sb.Brain))
    assert len(wanted.losses) >= 6
    assert_alike(trace, wanted)

"""A SpeechBrain recipe needs only another base class, and computes the same numbers."""

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
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.runs import Workplace, one_thread
from tests.speechbrain_recipe import load_recipe, make_asr, run

pytestmark = pytest.mark.slow

BrainClass = type[sb.Brain]
RELATIVE_TOLERANCE = 1e-6


@dataclass
class Trace:
    """The figures of a run."""

    batch_losses: list[float] = field(default_factory=list)  # as the recipe computes them
    rates: list[float] = field(default_factory=list)  # after every batch
    stage_losses: list[float] = field(default_factory=list)  # means
    hypotheses: list[Any] = field(default_factory=list)  # and the WER, of every evaluation
    parameters: list[torch.Tensor] = field(default_factory=list)


def traced(asr: BrainClass, trace: Trace, *, stop_at: int | None = None) -> BrainClass:
    """Record the figures of a recipe; stop it in batch ``stop_at``, as Ctrl-C would."""

    class Traced(asr):  # type: ignore[misc, valid-type]
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            loss = super().compute_objectives(predictions, batch, stage)
            if stage is Stage.TRAIN:
                if len(trace.batch_losses) == stop_at:
                    raise KeyboardInterrupt
                trace.batch_losses.append(loss.item())
            return loss

        def on_fit_batch_end(self, *arguments: Any) -> None:
            super().on_fit_batch_end(*arguments)
            optimizers = self.optimizers_dict.values()
            trace.rates += [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            super().on_stage_end(stage, stage_loss, epoch)
            trace.stage_losses.append(stage_loss)
            if stage is not Stage.TRAIN:
                trace.hypotheses += [score["hyp_tokens"] for score in self.wer_metric.scores]
                trace.hypotheses.append(self.wer_metric.summarize("WER"))
            trace.parameters = [value.detach().clone() for value in self.modules.parameters()]

    return Traced


def assert_equal(trace: Trace, expected: Trace) -> None:
    for name in ("batch_losses", "rates", "stage_losses"):
        figures = getattr(expected, name)
        assert getattr(trace, name) == pytest.approx(figures, rel=RELATIVE_TOLERANCE), name
    assert trace.hypotheses == expected.hypotheses
    for value, other in zip(trace.parameters, expected.parameters, strict=True):
        tolerance = RELATIVE_TOLERANCE * float(other.abs().max())
        torch.testing.assert_close(value, other, rtol=RELATIVE_TOLERANCE, atol=tolerance)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def train(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """Return a function that runs the recipe over a Brain class, in a new folder or another."""

    def train(
        base: BrainClass,
        *,
        vary: Callable[[BrainClass], BrainClass] = lambda asr: asr,
        stop_at: int | None = None,
        folder: Path | None = None,
        checkpointer: type[Checkpointer] | None = None,
        fit: Mapping[str, Any] = MappingProxyType({}),
        **run_opts: Any,
    ) -> Trace:
        output = folder or tmp_path_factory.mktemp("run")
        hparams = load_recipe(workplace.release, output)
        if checkpointer is not None:
            theirs = hparams["checkpointer"]
            hparams["checkpointer"] = checkpointer(
                theirs.checkpoints_dir, recoverables=theirs.recoverables
            )
        trace = Trace()
        asr = traced(vary(make_asr(base)), trace, stop_at=stop_at)
        try:
            run(asr, hparams, run_opts, **copy.deepcopy(dict(fit)))
        except KeyboardInterrupt:
            assert stop_at is not None
        return trace

    return train


@pytest.fixture(scope="module")
def uninterrupted(train: Callable[..., Trace]) -> Trace:
    return train(sbkit.Brain)


def test_recipe_trains_equally_under_both_brains(
    train: Callable[..., Trace], uninterrupted: Trace
) -> None:
    expected = train(sb.Brain)
    assert len(expected.batch_losses) == 3 * 12
    assert len(expected.stage_losses) == 3 * 2 + 1
    assert len(set(expected.rates)) == 3 * 12
    assert any(hypothesis != [] for hypothesis in expected.hypotheses[:4])
    assert_equal(uninterrupted, expected)


def test_recipe_stopped_within_an_epoch_resumes_exactly(
    train: Callable[..., Trace], uninterrupted: Trace, tmp_path: Path
) -> None:
    stopped, resumed = (
        train(sbkit.Brain, folder=tmp_path, stop_at=stop_at, ckpt_interval_steps=1)
        for stop_at in (18, None)
    )
    assert stopped.batch_losses + resumed.batch_losses == uninterrupted.batch_losses
    assert resumed.stage_losses == uninterrupted.stage_losses[2:]
    assert resumed.hypotheses[-5:] == uninterrupted.hypotheses[-5:]
    assert all(map(torch.equal, resumed.parameters, uninterrupted.parameters))


def test_run_of_speechbrain_resumes_under_sbkit(
    train: Callable[..., Trace], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(sb.Brain, folder=tmp_path / "stopped", stop_at=14)
    shutil.copytree(tmp_path / "stopped", tmp_path / "copy")
    resumed = train(sbkit.Brain, folder=tmp_path / "stopped", checkpointer=Checkpointer)
    assert "has no checksums" in caplog.text
    assert_equal(resumed, train(sb.Brain, folder=tmp_path / "copy"))


def own_step(asr: BrainClass) -> BrainClass:
    """Step as SpeechBrain's recipes with mixed precision do."""

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


def one_of_two_frozen(asr: BrainClass) -> BrainClass:
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
    trace, expected = (train(base, **VARIATIONS[name]) for base in (sbkit.Brain, sb.Brain))
    assert len(expected.batch_losses) >= 6
    assert_equal(trace, expected)

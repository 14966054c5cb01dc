"""A SpeechBrain recipe moves over by another base class, and comes to the same numbers."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
import torch
from speechbrain import Stage
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.dataio.sampler import ReproducibleRandomSampler

import sbkit
from tests.runs import make_workplace, one_thread
from tests.speechbrain_recipe import dataio_prepare, load_recipe, make_asr, run

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
def release(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace")).release


@pytest.fixture(scope="module")
def train(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """Run the recipe over a Brain, in a new folder or one that was stopped."""

    def train(
        base: Kind,
        *,
        vary: Callable[[Kind], Kind] = lambda asr: asr,
        stop_at: int | None = None,
        folder: Path | None = None,
        make_loader: Callable[[Any], dict[str, Any]] | None = None,
        number_of_epochs: int = 3,
        **run_opts: Any,
    ) -> Trace:
        output = folder or tmp_path_factory.mktemp("run")
        hparams = load_recipe(release, output, number_of_epochs=number_of_epochs)
        fit = {} if make_loader is None else make_loader(dataio_prepare(hparams)[0])
        trace = Trace()
        asr = traced(vary(make_asr(base)), trace, stop_at=stop_at)
        try:
            run(asr, hparams, run_opts, **fit)
        except KeyboardInterrupt:
            assert stop_at is not None
        return trace

    return train


@pytest.fixture(scope="module")
def whole(train: Callable[..., Trace]) -> Trace:
    """A run that nothing stops."""
    return train(sbkit.Brain)


def test_it_comes_to_the_same_under_both(train: Callable[..., Trace], whole: Trace) -> None:
    wanted = train(sb.Brain)
    assert len(wanted.losses) == 3 * 12
    assert len(wanted.stages) == 3 * 2 + 1
    assert len(set(wanted.rates)) == 3 * 12
    assert any(heard != [] for heard in wanted.heard[:4])
    assert_alike(whole, wanted)


@pytest.mark.parametrize(
    ("stop_at", "goes_on_from", "options"),
    [
        pytest.param(14, 12, {}, id="after an epoch"),
        pytest.param(18, 18, {"ckpt_interval_steps": 1}, id="within one"),
    ],
)
def test_stopped_it_goes_on_to_the_same_end(
    train: Callable[..., Trace],
    whole: Trace,
    tmp_path: Path,
    stop_at: int,
    goes_on_from: int,
    options: dict[str, Any],
) -> None:
    stopped = train(sbkit.Brain, folder=tmp_path, stop_at=stop_at, **options)
    rest = train(sbkit.Brain, folder=tmp_path, **options)
    assert stopped.losses == whole.losses[:stop_at]
    assert rest.losses == whole.losses[goes_on_from:]
    assert rest.stages == whole.stages[2:]
    assert rest.heard[-5:] == whole.heard[-5:]
    assert all(map(torch.equal, rest.parameters, whole.parameters))


def test_what_speechbrain_began_sbkit_ends(train: Callable[..., Trace], tmp_path: Path) -> None:
    train(sb.Brain, folder=tmp_path / "one", stop_at=14)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ended = train(sbkit.Brain, folder=tmp_path / "one")
    assert_alike(ended, train(sb.Brain, folder=tmp_path / "two"))


def own_loader(data: Any) -> dict[str, Any]:
    sampler = ReproducibleRandomSampler(data["train"])
    loader = SaveableDataLoader(
        data["train"], batch_size=4, sampler=sampler, collate_fn=sb.dataio.batch.PaddedBatch
    )
    return {"train_set": loader, "train_loader_kwargs": {}}


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffled": lambda data: {
        "train_loader_kwargs": {"batch_size": 5, "shuffle": True, "drop_last": True}
    },
    "a loader of its own": own_loader,
    "looped": lambda data: {
        "train_loader_kwargs": {"batch_size": 4, "looped_nominal_epoch": 3},
        "epoch_counter": iter([1, 2]),
        "progressbar": False,
    },
}


@pytest.mark.parametrize("name", LOADERS)
def test_it_takes_the_loaders_that_speechbrain_takes(
    train: Callable[..., Trace], name: str
) -> None:
    options = {"make_loader": LOADERS[name], "number_of_epochs": 2}
    trace, wanted = train(sbkit.Brain, **options), train(sb.Brain, **options)
    assert len(wanted.losses) >= 6
    assert_alike(trace, wanted)


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


def older_step(asr: Kind) -> Kind:
    """As in SpeechBrain's older recipes, which step the optimizer themselves."""

    class OlderStep(asr):  # type: ignore[misc, valid-type]
        def fit_batch(self, batch: Any) -> Any:
            outputs = self.compute_forward(batch, Stage.TRAIN)
            loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            loss.backward()
            self.check_gradients()
            self.optimizer.step()
            self.zero_grad(set_to_none=True)
            self.on_fit_batch_end(batch, outputs, loss, True)
            return loss.detach()

    return OlderStep


def wrapped_steps(asr: Kind) -> Kind:
    """Work around the steps of the Brain, which give tensors."""

    class WrappedSteps(asr):  # type: ignore[misc, valid-type]
        def fit_batch(self, batch: Any) -> Any:
            loss = super().fit_batch(batch)
            assert loss.item() > 0
            return loss

        def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
            assert self.step >= 1
            return super().evaluate_batch(batch, stage).detach().cpu()

        def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> Any:
            if epoch % 2 == 0:
                return super()._fit_valid(valid_set, epoch, enable)
            return None

    return WrappedSteps


def two_optimizers(asr: Kind, *, frozen: bool = False) -> Kind:
    """Step two optimizers, of which one may stay frozen, as recipes on pretrained encoders do."""

    class TwoOptimizers(asr):  # type: ignore[misc, valid-type]
        def init_optimizers(self) -> None:
            self.encoder_optimizer = self.opt_class(self.modules.encoder.parameters())
            self.ctc_optimizer = self.opt_class(self.modules.ctc_lin.parameters())
            self.optimizers_dict = {"ctc": self.ctc_optimizer, "encoder": self.encoder_optimizer}
            self.checkpointer.add_recoverable("ctc_optimizer", self.ctc_optimizer)
            self.checkpointer.add_recoverable("encoder_optimizer", self.encoder_optimizer)

        def freeze_optimizers(self, optimizers: dict[str, Any]) -> dict[str, Any]:
            return {"ctc": optimizers["ctc"]} if frozen else optimizers

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
            self.hparams.lr_annealing(self.ctc_optimizer)

    return TwoOptimizers


NOT_CLIPPED = {"max_grad_norm": 1e6}  # as the older recipes
A_FEW_BATCHES = {"debug": True, "debug_batches": 6, "debug_epochs": 2, "debug_persistently": True}
VARIATIONS = {
    "that accumulates": (own_step, {"grad_accumulation_factor": 4}),
    "an older step": (older_step, NOT_CLIPPED),
    "wrapped steps": (wrapped_steps, {}),
    "two optimizers": (two_optimizers, {"max_grad_norm": 0.5}),
    "one of two frozen": (partial(two_optimizers, frozen=True), {"max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_it_may_override_what_speechbrain_lets_it(train: Callable[..., Trace], name: str) -> None:
    vary, run_opts = VARIATIONS[name]
    options = {"vary": vary, **A_FEW_BATCHES, **run_opts}
    trace, wanted = train(sbkit.Brain, **options), train(sb.Brain, **options)
    assert 8 <= len(wanted.losses) <= 2 * 6
    assert_alike(trace, wanted)

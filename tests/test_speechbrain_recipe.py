"""A SpeechBrain recipe needs only another base class, and computes the same numbers.

It is the pattern of SpeechBrain's own CTC recipes, on a model of 9,000 parameters: data comes as
dynamic items of a csv file, in batches by duration; lengths are relative; the loss is a mean.
"""

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import soundfile
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain import Stage
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.encoder import CTCTextEncoder
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.data_pipeline import provides, takes

import sbkit
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.runs import Workplace, one_thread, rows_of

pytestmark = pytest.mark.slow

SPLITS = {"train": "train", "valid": "dev", "test": "test"}
HPARAMS = """
seed: 1986
__set_seed: !apply:torch.manual_seed [!ref <seed>]
output_folder: !PLACEHOLDER
save_folder: !ref <output_folder>/save

number_of_epochs: 3
lr: 0.002
max_grad_norm: 1.0
noprogressbar: True
sorting: random
dynamic_batch_sampler:
    max_batch_length: 6.0
    num_buckets: 3
    shuffle: True
    batch_ordering: random
valid_dataloader_opts:
    batch_size: 3

blank_index: 0
output_neurons: 25

compute_features: !new:speechbrain.lobes.features.Fbank
    n_mels: 40
normalize: !new:speechbrain.processing.features.InputNormalization
    norm_type: global
encoder: !new:speechbrain.lobes.models.CRDNN.CRDNN
    input_size: 40
    activation: !name:torch.nn.LeakyReLU
    dropout: 0.15
    cnn_blocks: 1
    cnn_channels: [4]
    cnn_kernelsize: [3, 3]
    time_pooling: True
    rnn_class: !name:speechbrain.nnet.RNN.GRU
    rnn_layers: 2
    rnn_neurons: 16
    rnn_bidirectional: False
    dnn_blocks: 1
    dnn_neurons: 32
ctc_lin: !new:speechbrain.nnet.linear.Linear
    input_size: 32
    n_neurons: !ref <output_neurons>
log_softmax: !new:speechbrain.nnet.activations.Softmax
    apply_log: True
ctc_cost: !name:speechbrain.nnet.losses.ctc_loss
    blank_index: !ref <blank_index>

modules:
    normalize: !ref <normalize>
    encoder: !ref <encoder>
    ctc_lin: !ref <ctc_lin>
model: !new:torch.nn.ModuleList
    - [!ref <encoder>, !ref <ctc_lin>]

opt_class: !name:torch.optim.Adam
    lr: !ref <lr>
lr_annealing: !new:speechbrain.nnet.schedulers.NoamScheduler
    lr_initial: !ref <lr>
    n_warmup_steps: 20
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>
error_rate_computer: !name:speechbrain.utils.metric_stats.ErrorRateStats
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        model: !ref <model>
        normalizer: !ref <normalize>
        noam_scheduler: !ref <lr_annealing>
        counter: !ref <epoch_counter>
"""


def make_asr(base: type[sb.Brain]) -> type[sb.Brain]:
    """Define the recipe over one Brain or the other."""

    class ASR(base):  # type: ignore[misc, valid-type]
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            batch = batch.to(self.device)
            wavs, wav_lens = batch.sig
            feats = self.hparams.compute_features(wavs)
            feats = self.modules.normalize(feats, wav_lens)
            logits = self.modules.ctc_lin(self.modules.encoder(feats))
            return self.hparams.log_softmax(logits), wav_lens

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            p_ctc, wav_lens = predictions
            tokens, tokens_lens = batch.tokens
            loss = self.hparams.ctc_cost(p_ctc, tokens, wav_lens, tokens_lens)
            if stage != Stage.TRAIN:
                sequences = sb.decoders.ctc_greedy_decode(
                    p_ctc, wav_lens, blank_id=self.hparams.blank_index
                )
                decoded = self.label_encoder.decode_ndim(sequences)
                words = ["".join(tokens).split() for tokens in decoded]
                self.wer_metric.append(batch.id, words, [text.split() for text in batch.words])
            return loss

        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            if stage != Stage.TRAIN:
                self.wer_metric = self.hparams.error_rate_computer()

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
            if should_step:
                self.hparams.lr_annealing(self.optimizer)

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage == Stage.VALID:
                wer = self.wer_metric.summarize("error_rate")
                # SpeechBrain takes any of equal ones, sbkit the newest.
                meta = {"WER": wer - 1e-6 * epoch, "epoch": epoch}
                self.checkpointer.save_and_keep_only(meta=meta, min_keys=["WER"])

    return ASR


def load_recipe(release: Path, output: Path) -> dict[str, Any]:
    """Read the hyperparameters, for the data of a release."""
    output.mkdir(parents=True, exist_ok=True)
    hparams: dict[str, Any] = load_hyperpyyaml(HPARAMS, {"output_folder": str(output)})
    return {**hparams, "release": release}


def list_clips(release: Path, name: str) -> dict[str, dict[str, Any]]:
    """List a split as SpeechBrain's preparations do."""
    clips = {}
    for row in rows_of(release / f"{name}.tsv"):
        clip = release / "clips" / row["path"]
        sentence = row["sentence"].lower()
        words = "".join(letter for letter in sentence if letter.isalpha() or letter == " ")
        clips[clip.stem] = {"duration": soundfile.info(clip).duration, "wav": clip, "words": words}
    return clips


def dataio_prepare(hparams: dict[str, Any]) -> tuple[dict[str, DynamicItemDataset], CTCTextEncoder]:
    """Make the datasets of dynamic items, and the encoder of their characters."""
    label_encoder = CTCTextEncoder()
    label_encoder.expect_len(hparams["output_neurons"])

    @takes("wav")
    @provides("sig")
    def audio_pipeline(wav: Path) -> torch.Tensor:
        return torch.from_numpy(soundfile.read(wav, dtype="float32")[0])

    @takes("words")
    @provides("char_list", "tokens")
    def text_pipeline(words: str) -> Any:
        yield list(words)
        yield torch.LongTensor(label_encoder.encode_sequence(list(words)))

    data = {
        split: DynamicItemDataset(
            list_clips(hparams["release"], name),
            dynamic_items=[audio_pipeline, text_pipeline],
            output_keys=["id", "sig", "words", "char_list", "tokens"],
        )
        for split, name in SPLITS.items()
    }
    label_encoder.load_or_create(
        path=Path(hparams["output_folder"]) / "label_encoder.txt",
        from_didatasets=list(data.values()),
        output_key="char_list",
        special_labels={"blank_label": hparams["blank_index"]},
        sequence_input=True,
    )
    return data, label_encoder


def run(
    asr: type[sb.Brain], hparams: dict[str, Any], run_opts: dict[str, Any], **fit: Any
) -> sb.Brain:
    """Train and evaluate, as the end of a SpeechBrain `train.py` does.

    ``fit`` overrides what `fit` is given: another data set or loader, other epochs.
    """
    data, label_encoder = dataio_prepare(hparams)
    brain = asr(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts={"device": "cpu", **run_opts},
        checkpointer=hparams["checkpointer"],
    )
    brain.label_encoder = label_encoder
    if "train_loader_kwargs" not in fit:
        sampler = DynamicBatchSampler(data["train"], **hparams["dynamic_batch_sampler"])
        brain.train_sampler = sampler
        fit["train_loader_kwargs"] = {"batch_sampler": sampler}
    valid = hparams["valid_dataloader_opts"]
    brain.fit(
        **{"epoch_counter": hparams["epoch_counter"], "train_set": data["train"], **fit},
        valid_set=data["valid"],
        valid_loader_kwargs=valid,
    )
    brain.evaluate(data["test"], min_key="WER", test_loader_kwargs=dict(valid))
    return brain


# -- its figures under both Brains ----------------------------------------------------------------

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
    assert any(tokens for tokens in expected.hypotheses if isinstance(tokens, list))
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


def validated_rarely(asr: BrainClass) -> BrainClass:
    """Validate every second epoch, as recipes with `valid_freq` do."""

    class Rarely(asr):  # type: ignore[misc, valid-type]
        def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
            if epoch % 2 == 1:
                super()._fit_valid(valid_set, epoch, enable)

    return Rarely


def started_by_hand(asr: BrainClass) -> BrainClass:
    """Compile, wrap and recover in `on_fit_start`, as recipes that load parts do."""

    class ByHand(asr):  # type: ignore[misc, valid-type]
        def on_fit_start(self) -> None:
            self._compile()
            self._wrap_distributed()
            self.init_optimizers()
            self.checkpointer.recover_if_possible()

    return ByHand


LOOPED = {"batch_size": 4, "looped_nominal_epoch": 3}
A_FEW_BATCHES = {"debug": True, "debug_batches": 6, "debug_epochs": 2, "debug_persistently": True}
VARIATIONS: dict[str, dict[str, Any]] = {
    "accumulates": {"vary": own_step, "grad_accumulation_factor": 4, **A_FEW_BATCHES},
    "freezes": {"vary": one_of_two_frozen, "max_grad_norm": 0.5, **A_FEW_BATCHES},
    "validates rarely": {"vary": validated_rarely},
    "starts by hand": {"vary": started_by_hand},
    "shuffles": {"fit": {"train_loader_kwargs": {"batch_size": 5, "shuffle": True}}},
    "loops": {"fit": {"train_loader_kwargs": LOOPED, "epoch_counter": [1, 2]}},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_recipe_overrides_behave_as_in_speechbrain(train: Callable[..., Trace], name: str) -> None:
    trace, expected = (train(base, **VARIATIONS[name]) for base in (sbkit.Brain, sb.Brain))
    assert len(expected.batch_losses) >= 6
    assert_equal(trace, expected)

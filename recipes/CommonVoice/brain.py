"""The recipe's Brain: what is predicted, what it loses, and what is reported.

Legend: B utterances, U frames of 40 ms, L tokens, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.audio.augment import speed_perturb
from sbkit.data.batch import Batch
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.curves import draw_curves
from sbkit.logs.log import FinalFigures, RunLog
from sbkit.logs.report import write_summary, write_wer
from sbkit.models.asr import AsrModel
from sbkit.models.decoding import greedy
from sbkit.models.loss import Loss, attention_loss, ctc
from sbkit.text.wer import Scored, score, total_scores
from sbkit.train.brain import Brain
from sbkit.train.cost import CostRecorder
from sbkit.train.feature_statistics import measure_features


@dataclass(frozen=True)
class Predictions:
    """What the model says of a batch.

    log_probs (B, U, V) of CTC and, if asked for, from the intermediate of the encoder; frames (B,);
    logits (B, L + 1, V) of the decoder if it was run.
    """

    log_probs: Tensor
    intermediate: Tensor | None
    frames: Tensor
    logits: Tensor | None


class AsrBrain(Brain):
    """Train CTC, and an attention decoder beside it while `ctc_weight` is below one."""

    def __init__(self, *, measure_set: Iterable[Batch], **options: Any) -> None:
        """Take SpeechBrain's options, and the training set in order, to measure its features."""
        super().__init__(**options)
        self.measure_set = measure_set
        self.tokenizer = self.hparams.tokenizer
        self.cost_recorder = CostRecorder(self.modules, self.device)
        self.asr_model = AsrModel(
            model=self.modules["model"],
            compute_features=self.hparams.compute_features.to(self.device),
            CNN=self.hparams.CNN,
            Transformer=self.hparams.Transformer,
            ctc_lin=self.hparams.ctc_lin,
            seq_lin=self.hparams.seq_lin,
            vocabulary=self.tokenizer.vocabulary,
        )

    def compute_forward(self, batch: Batch, stage: Stage) -> Predictions:
        """Walk from the audio to the scores of every label at every frame."""
        audio, samples = speed_perturb(batch.audio, batch.samples, batch.speed_groups)
        features, frames = self.asr_model.features(audio.float(), samples)
        if stage is Stage.TRAIN:
            features = self.hparams.spec_augment(features, frames)
        with_decoder = self.hparams.ctc_weight < 1
        encoded = self.asr_model.run(
            features,
            frames,
            tokens=batch.tokens if with_decoder else None,
            return_intermediate=stage is Stage.TRAIN and self.hparams.inter_ctc_weight > 0,
        )
        log_probs = self.asr_model.ctc_log_probs
        intermediate = None if encoded.intermediate is None else log_probs(encoded.intermediate)
        return Predictions(log_probs(encoded.states), intermediate, encoded.frames, encoded.logits)

    def compute_objectives(self, predictions: Predictions, batch: Batch, stage: Stage) -> Loss:
        """Sum the losses per utterance; outside training, also score the best path."""
        vocabulary = self.tokenizer.vocabulary
        tokens, counts = batch.tokens, batch.token_lengths
        loss = ctc(predictions.log_probs, predictions.frames, tokens, counts, vocabulary.blank)
        if predictions.intermediate is not None:
            intermediate = ctc(
                predictions.intermediate, predictions.frames, tokens, counts, vocabulary.blank
            )
            loss = intermediate.interpolate(loss, self.hparams.inter_ctc_weight)
        if predictions.logits is not None:
            smoothing = self.hparams.label_smoothing if stage is Stage.TRAIN else 0.0
            decoder = attention_loss(predictions.logits, tokens, counts, vocabulary.eos, smoothing)
            loss = loss.interpolate(decoder, self.hparams.ctc_weight)
        if stage is not Stage.TRAIN:
            self.scored += self._score(predictions, batch)
        return Loss(loss.sums * batch.weights, loss.counts * batch.weights)

    def _score(self, predictions: Predictions, batch: Batch) -> list[Scored]:
        best = greedy(predictions.log_probs, predictions.frames, self.tokenizer.vocabulary.blank)
        hypotheses = map(self.tokenizer.decode, best)
        return list(map(score, batch.ids, batch.texts, hypotheses))

    def validation_error(self) -> float:
        """Return the CER of dev with the weights as they are."""
        super().validation_error()
        share = gather_over_ranks(self.scored)
        return total_scores([each for scored in share for each in scored]).cer

    def fit(self, *arguments: Any, **options: Any) -> None:
        """Train, and watch what it takes."""
        with self.cost_recorder:
            super().fit(*arguments, **options)

    # -- hooks --------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        batches = self.pinging(self.measure_set, "measure")
        measure_features(self.modules, self.asr_model, batches, self.device)

    def on_fit_batch_start(self, batch: Batch, should_step: bool) -> None:
        """Set the rate and the seed from the place in the run: a resumed run needs nothing else."""
        epochs = self.hparams.epoch_counter
        progress = (epochs.current - 1 + self.epoch_share) / epochs.limit
        for group in self.optimizer.param_groups:
            scale = group.get("lr_scale", 1.0)
            group["lr"] = self.hparams.lr * self.hparams.lr_schedule(progress) * scale
        place = (self.hparams.seed, epochs.current, self.step, rank())
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        self.cost_recorder.begin_step(batch.audio.numel())

    def on_fit_batch_end(
        self, batch: Batch, outputs: Predictions, loss: Loss, should_step: bool
    ) -> None:
        """See what the step took."""
        self.cost_recorder.end_step()

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Start a new list of scored utterances."""
        self.scored: list[Scored] = []
        if stage is Stage.TRAIN:
            self.cost_recorder.begin_epoch(self.optimizer_step)
        elif stage is Stage.VALID:
            self.cost_recorder.begin_validation()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """After validation: log and save. After the test: report."""
        self.cost_recorder.end_step()
        if stage is Stage.TRAIN:
            return
        scored = [each for share in gather_over_ranks(self.scored) for each in share]
        scores = total_scores(scored)
        if stage is Stage.VALID and epoch is not None:
            self.log_epoch(epoch, dev_loss=stage_loss, cer=scores.cer, wer=scores.wer)
            self.checkpointer.save_and_keep_only(
                meta={"CER": scores.cer, "WER": scores.wer, "epoch": epoch},
                min_keys=["CER"],
                num_to_keep=self.hparams.average_checkpoints,
            )
            self.cost_recorder.end_epoch(self.optimizer_step)
        elif rank() == 0:
            self._report(scored)

    def _report(self, scored: list[Scored]) -> None:
        folder = Path(self.hparams.output_folder)
        scores = total_scores(scored)
        log = RunLog(folder, resume_step=self.optimizer_step)
        epochs, step = self.hparams.epoch_counter.limit, self.optimizer_step
        log.write(FinalFigures(epoch=epochs, step=step, cer=scores.cer, wer=scores.wer))
        log.close()
        write_wer(folder / "wer_test.txt", scored)
        write_summary(
            folder / "summary.json",
            test=scores,
            parameters=sum(each.numel() for each in self.modules.parameters()),
            train_seconds=self.metrics.train_seconds,
            audio_seconds=self.metrics.audio_seconds,
            device=self.device,
            cost=self.cost_recorder.summary(folder, self.optimizers_dict or {}),
        )
        draw_curves(folder / "train_log.jsonl", folder / "curves.png")

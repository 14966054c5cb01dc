"""Speech recognition by CTC, optionally with an attention decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from speechbrain import Stage
from torch import Tensor, nn

from recipes.asr.data import make_asr_loaders, prepare_tokenizer
from recipes.asr.decoding import RunDecoding
from recipes.prepare import COMMON_RANGES, corpus_of, prepare_transcripts
from sbkit.audio.augment import Augmentation
from sbkit.config.ranges import SHARE, Range, Text
from sbkit.data.batch import TextBatch
from sbkit.evaluate.wer import (
    BLANK_FRAMES,
    TOKENS_WRITTEN,
    ScoredUtterance,
    greedy_shares,
    total_scores,
)
from sbkit.evaluate.wer_report import describe_results, slice_figures, write_results
from sbkit.lm.seen import describe_seen
from sbkit.logs.metric import Metric, Metrics
from sbkit.models.asr import AsrModel, Predictions
from sbkit.models.encoder import encoder_parts
from sbkit.models.loss import Loss, attention_loss, ctc
from sbkit.runtime.transcriber import Segmenter
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.tasks.task import Task
from sbkit.train.advice import advise_recognizer, find_causes
from sbkit.train.brain import Brain
from sbkit.train.evaluation import Cause
from sbkit.train.recipe import Recipe

FRAME_METRICS: Metrics = dict.fromkeys((BLANK_FRAMES, TOKENS_WRITTEN), Metric(lower_is_better=None))


class AsrBrain(Brain):
    """Train CTC, and an attention decoder if `ctc_weight` is below one."""

    task: ClassVar[Task] = SPEECH_RECOGNITION  # the subclass of another recipe sets its own
    metrics: ClassVar[Metrics] = {**SPEECH_RECOGNITION.metrics, **FRAME_METRICS}
    evaluates_segments: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer = self.hparams.tokenizer
        self._stage = Stage.TRAIN
        self.asr_model = self.make_model(
            model=self.modules["model"],
            **encoder_parts(self.hparams.knobs),
            ctc_lin=self.hparams.ctc_lin,
            seq_lin=getattr(self.hparams, "seq_lin", None),
            linear_stack=getattr(self.hparams, "linear_stack", None),
            vocabulary=self.tokenizer.vocabulary,
        )
        self.asr_model.to(self.device)
        self.augmentation = Augmentation(self.hparams, features=self.asr_model.encoder.features)
        self.decoding = RunDecoding(self.hparams, self.asr_model)

    def make_model(self, **parts: Any) -> AsrModel:
        """Build the model to train, of the class that the task's bundles contain.

        A subclass may override this, and pass more parts from the hparams.
        """
        model: AsrModel = self.task.require_export().import_model_class()(**parts)
        return model

    @property
    def unused_modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that no loss trains: without its loss, the attention decoder."""
        return self.asr_model.unused_modules(self.hparams.ctc_weight)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        audio, lengths = self.augmentation.augment_audio(batch, training=stage is Stage.TRAIN)
        if stage is not Stage.TRAIN and self.decoding.is_long(batch):
            return self._run_in_segments(audio, batch, stage)
        return self.run_model(audio, lengths, batch, stage)

    def _run_in_segments(self, audio: Tensor, batch: TextBatch, stage: Stage) -> Predictions:
        """Run the model on segments of a recording (1, S), cut and joined as for a transcript."""
        frame_samples = self.asr_model.samples_per_frame
        segmenter = Segmenter(self.hparams.sample_rate, frame_samples)
        no_tokens = torch.zeros(1, dtype=torch.int64)
        batch = replace(batch, tokens=batch.tokens[:, :0], token_lengths=no_tokens)
        states: list[Tensor] = []
        log_probs: list[Tensor] = []
        skipped = 0  # frames of the segment that belong to the previous one
        for segment in segmenter.split(batch.clips()):
            self.watchdog.ping(stage.name.lower(), self.optimizer_step, batch.ids)
            samples = torch.tensor([len(segment.samples)])
            piece = audio[:, segment.start : segment.start + len(segment.samples)]
            predictions = self.run_model(piece, samples, batch, stage)
            scores = predictions.log_probs[0, : int(predictions.frame_lengths)].cpu()
            end, skipped_by_next = segment.end_frame(
                scores.numpy(), frame_samples, self.tokenizer.silent
            )
            states.append(predictions.states[:, skipped:end].cpu())
            log_probs.append(scores[skipped:end])
            skipped = skipped_by_next
        joined = torch.cat(log_probs).unsqueeze(0)
        frames = torch.tensor([joined.shape[1]])
        return Predictions(torch.cat(states, 1), joined, None, frames, None)

    def run_model(
        self, audio: Tensor, audio_lengths: Tensor, batch: TextBatch, stage: Stage
    ) -> Predictions:
        """Run the model on augmented audio (B, S); in training, it masks features."""
        training = stage is Stage.TRAIN
        return self.asr_model.run(
            audio,
            audio_lengths,
            tokens=batch.tokens if self.hparams.ctc_weight < 1 else None,
            return_intermediate=training and self.hparams.inter_ctc_weight > 0,
            spec_augment=self.augmentation.feature_augmentation(training=training),
        )

    def compute_objectives(self, predictions: Predictions, batch: TextBatch, stage: Stage) -> Loss:
        """Interpolate the losses of each utterance, and multiply them by its weight."""
        if stage is not Stage.TRAIN and self.decoding.is_long(batch):
            return Loss(torch.zeros(1), torch.zeros(1))
        vocabulary = self.tokenizer.vocabulary
        frame_lengths = predictions.frame_lengths
        tokens = batch.tokens
        token_lengths = batch.token_lengths
        blank = vocabulary.blank
        loss = ctc(predictions.log_probs, frame_lengths, tokens, token_lengths, blank)
        if predictions.intermediate is not None:
            intermediate = ctc(
                predictions.intermediate, frame_lengths, tokens, token_lengths, blank
            )
            loss = intermediate.interpolate(loss, own_weight=self.hparams.inter_ctc_weight)
        if predictions.logits is not None:
            smoothing = self.hparams.label_smoothing if stage is Stage.TRAIN else 0.0
            attention = attention_loss(
                predictions.logits, tokens, token_lengths, vocabulary.eos, smoothing
            )
            loss = loss.interpolate(attention, own_weight=self.hparams.ctc_weight)
        return Loss(loss.sums * batch.weights, loss.counts * batch.weights)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.asr_model.encoder.features)

    # -- evaluation ---------------------------------------------------------------------------

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        super().on_stage_start(stage, epoch)
        self._stage = stage

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights to test, and fit the decoder to the validation sets."""
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        self.decoding.fit(self)

    def score(self, predictions: Predictions, batch: TextBatch) -> list[ScoredUtterance]:
        """Decode every utterance and count its errors.

        Test sets are decoded with the run's decoder, validation sets greedily.
        """
        log_probs = predictions.log_probs
        frame_lengths = predictions.frame_lengths
        if self._stage is Stage.TEST:
            return self.decoding.score(batch, log_probs, frame_lengths, predictions.states)
        return self.decoding.score_greedily(batch, log_probs, frame_lengths)

    def measure(self, results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
        scores = total_scores(results)
        rates = {"CER": scores.cer}
        if self.decoding.by_words:
            rates["WER"] = scores.wer
        return rates | greedy_shares(results)

    def advise(self, values: Mapping[str, float]) -> str | None:
        return advise_recognizer(self, values)

    def likely_causes(self) -> Sequence[Cause]:
        return find_causes(self)

    def seconds_after_training(self, test_share: float) -> float:
        """Estimate the time to fit the decoder and to decode the test sets."""
        return self.decoding.seconds_to_fit(self, test_share)

    def measure_slice(self, results: Sequence[ScoredUtterance]) -> Mapping[str, Any]:
        return slice_figures(results)

    def describe(self, results: Sequence[ScoredUtterance]) -> str:
        return describe_results(results)

    def report(
        self, split: str, results: Sequence[ScoredUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write every utterance with its errors; return the figures and notes."""
        figures = write_results(folder, split, results)
        decoder, texts = self.decoding.decoder, [utterance.reference for utterance in results]
        models = None if decoder is None else decoder.language_models
        seen = {} if models is None else models.count_seen(texts, self.decoding.table)
        notes = [*self.decoding.notes, *figures["notes"], *map(describe_seen, seen.values())]
        return {**figures, **seen, "decoder": self.decoding.decoder_type, "notes": notes}


ASR = Recipe(
    task=SPEECH_RECOGNITION,
    prepare_splits=prepare_transcripts,
    prepare_labels=prepare_tokenizer,
    make_loaders=make_asr_loaders,
    brain=AsrBrain,
    corpus=corpus_of,
    ranges={
        **COMMON_RANGES,
        "ctc_weight": Range(low=0.01, high=1, advice="At 0, the CTC head would not be trained."),
        "inter_ctc_weight": Range(
            low=0, high=0.99, advice="At 1, the upper half of the encoder would not be trained."
        ),
        "label_smoothing": SHARE,
        "lm_text": Text(or_list=True),
    },
)

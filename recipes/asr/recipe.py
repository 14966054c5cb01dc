"""Speech recognition by CTC, optionally with an attention decoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from speechbrain import Stage
from torch import nn

from recipes.asr.data import make_asr_loaders, prepare_tokenizer
from recipes.asr.decoding import RunDecoding
from recipes.prepare import COMMON_RANGES, corpus_of, prepare_transcripts
from sbkit.audio.augment import Augmentation
from sbkit.config.ranges import SHARE, Range, Text
from sbkit.data.batch import TextBatch
from sbkit.evaluate.wer import ScoredUtterance, total_scores
from sbkit.evaluate.wer_report import (
    describe_results,
    describe_silence,
    report_errors,
    slice_error_rates,
)
from sbkit.logs.metric import Metrics
from sbkit.models.asr import AsrModel, Predictions
from sbkit.models.encoder import encoder_parts
from sbkit.models.loss import Loss, attention_loss, ctc
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.tasks.task import Task
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe


class AsrBrain(Brain):
    """Train CTC, and an attention decoder if `ctc_weight` is below one."""

    task: ClassVar[Task] = SPEECH_RECOGNITION  # of the recipe
    metrics: ClassVar[Metrics] = SPEECH_RECOGNITION.metrics

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
        """Build the model that is trained, and that a bundle of the task contains.

        An override may add more parts from the hparams.
        """
        model: AsrModel = self.task.require_export().import_model_class()(**parts)
        return model

    @property
    def unused_modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that no loss trains: the attention decoder, if there is only CTC."""
        return self.asr_model.unused_modules(self.hparams.ctc_weight)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        training = stage is Stage.TRAIN
        return self.asr_model.run(
            *self.augmentation.augment_audio(batch, training=training),
            tokens=batch.tokens if self.hparams.ctc_weight < 1 else None,
            return_intermediate=training and self.hparams.inter_ctc_weight > 0,
            spec_augment=self.augmentation.feature_augmentation(training=training),
        )

    def compute_objectives(self, predictions: Predictions, batch: TextBatch, stage: Stage) -> Loss:
        """Sum the losses of each utterance."""
        vocabulary, frames = self.tokenizer.vocabulary, predictions.frame_lengths
        tokens, counts = batch.tokens, batch.token_lengths
        loss = ctc(predictions.log_probs, frames, tokens, counts, vocabulary.blank)
        if predictions.intermediate is not None:
            intermediate = ctc(predictions.intermediate, frames, tokens, counts, vocabulary.blank)
            loss = intermediate.interpolate(loss, self.hparams.inter_ctc_weight)
        if predictions.logits is not None:
            smoothing = self.hparams.label_smoothing if stage is Stage.TRAIN else 0.0
            decoder = attention_loss(predictions.logits, tokens, counts, vocabulary.eos, smoothing)
            loss = loss.interpolate(decoder, self.hparams.ctc_weight)
        return Loss(loss.sums * batch.weights, loss.counts * batch.weights)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_features(self.asr_model.encoder.features)

    # -- evaluation ---------------------------------------------------------------------------

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        super().on_stage_start(stage, epoch)
        self._stage = stage

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights to test, and fit the decoder to the validation sets."""
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        self.decoding.fit(self)

    def score(self, predictions: Predictions, batch: TextBatch) -> list[ScoredUtterance]:
        """Decode every utterance and count its errors; greedily, except for a test set."""
        log_probs, frames = predictions.log_probs, predictions.frame_lengths
        if self._stage is Stage.TEST:
            return self.decoding.score(batch, log_probs, frames, predictions.states)
        return self.decoding.score_greedily(batch, log_probs, frames)

    def measure(self, results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
        scores = total_scores(results)
        return {"CER": scores.cer, **({"WER": scores.wer} if self.decoding.by_words else {})}

    def seconds_after_training(self, test_share: float) -> float:
        """Estimate the time to fit the decoder and to decode the test sets."""
        return self.decoding.seconds_to_fit(self, test_share)

    def measure_slice(self, results: Sequence[ScoredUtterance]) -> Mapping[str, Any]:
        return slice_error_rates(results)

    def describe(self, results: Sequence[ScoredUtterance]) -> str:
        return describe_results(results)

    def report(
        self, split: str, results: Sequence[ScoredUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write every utterance with its errors; return the figures and notes."""
        figures = {**report_errors(folder, split, results), "decoder": self.decoding.decoder_type}
        notes = [*self.decoding.notes, *describe_silence(results)]
        return {**figures, "notes": notes} if notes else figures


ASR = Recipe(
    task=SPEECH_RECOGNITION,
    prepare_splits=prepare_transcripts,
    prepare_labels=prepare_tokenizer,
    make_loaders=make_asr_loaders,
    brain=AsrBrain,
    corpus=corpus_of,
    ranges={
        **COMMON_RANGES,
        "ctc_weight": Range(low=0.01, high=1, advice="All decoding is by CTC, which must learn."),
        "inter_ctc_weight": Range(
            low=0, high=0.99, advice="At 1 nothing trains the upper encoder."
        ),
        "label_smoothing": SHARE,
        "lm_text": Text(),
    },
)

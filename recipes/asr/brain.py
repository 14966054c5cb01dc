"""The recipe's Brain: what is predicted, its losses, and what is reported.

Legend: B utterances, U frames of 40 ms, L tokens, V vocabulary.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from speechbrain import Stage
from torch import Tensor, nn

from recipes.asr.confidence import fit_readers
from recipes.asr.decoder_weights import choose_weights, hear
from sbkit.audio.augment import Augmentation
from sbkit.base.cores import usable_cores
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.data.batches.batch import TextBatch
from sbkit.decoding.attend import attend
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.clip_reader import ClipReader, Recognized
from sbkit.decoding.confidence import GREEDY
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.reading import HeardClip, Reading, raise_errors
from sbkit.decoding.tune import take_enough
from sbkit.distributed.rendezvous import read_number
from sbkit.evaluate.wer import Scored, score, total_scores
from sbkit.evaluate.wer_report import describe_results, report_errors, slice_error_rates
from sbkit.logs.metric import Metric, Metrics
from sbkit.models.asr import AsrModel
from sbkit.models.decoding import greedy
from sbkit.models.encoder import encoder_parts
from sbkit.models.loss import Loss, attention_loss, ctc
from sbkit.text.normalize import separates_words
from sbkit.train.brain import Brain
from sbkit.train.feature_statistics import measure_on_start

ORDERS = ("word_lm_order", "token_lm_order")  # of the decoder's language models


@dataclass(frozen=True)
class Predictions:
    """What the model says of a batch.

    states (B, U, D) of the encoder; log_probs (B, U, V) of CTC and, if asked for, from the
    intermediate of the encoder; frames (B,); logits (B, L + 1, V) of the decoder if it was run.
    """

    states: Tensor
    log_probs: Tensor
    intermediate: Tensor | None
    frames: Tensor
    logits: Tensor | None


class AsrBrain(Brain):
    """Train CTC, and an attention decoder beside it while `ctc_weight` is below one."""

    metrics: ClassVar[Metrics] = {"CER": Metric(), "WER": Metric()}

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        self.tokenizer = self.hparams.tokenizer
        self.decoder: BeamDecoder | None = getattr(self.hparams, "decoder", None)
        if self.decoder is not None and self.hparams.ctc_weight == 1:
            if self.decoder.attention == "joint":
                raise SbkitError(
                    "`attention_decoding: joint` must have an attention decoder that is trained, "
                    "but `ctc_weight` is 1.0. Lower that, or take rescore, which then does nothing."
                )
            self.decoder = self.decoder.with_attention(None)  # it is not trained
        if self.decoder is not None:
            self.decoder.require_possible()
        elif any(getattr(self.hparams, name, 0) for name in ORDERS):
            raise SbkitError(
                f"`{ORDERS[0]}` and `{ORDERS[1]}` must be those of a `decoder`, but the YAML has "
                "none, so that greedy decoding uses no language model. Set both to 0, or add the "
                "decoder."
            )
        self._readings: dict[str, Reading] = {}  # by decoder, for a test
        self.by_words = separates_words(getattr(self.hparams, "language", "und"))
        self._stage = Stage.TRAIN
        self.asr_model = AsrModel(
            model=self.modules["model"],
            **encoder_parts(vars(self.hparams)),
            ctc_lin=self.hparams.ctc_lin,
            seq_lin=getattr(self.hparams, "seq_lin", None),
            vocabulary=self.tokenizer.vocabulary,
        )
        self.asr_model.to(self.device)
        has_features = self.asr_model.encoder.features is not None
        self.augmentation = Augmentation(self.hparams, has_features=has_features)

    @property
    def resting(self) -> tuple[nn.Module, ...]:
        """Return the modules that no loss of these weights trains: the decoder of CTC alone."""
        return self.asr_model.unused_modules(self.hparams.ctc_weight)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        """Compute the scores of every label at every frame from the audio."""
        training = stage is Stage.TRAIN
        encoded = self.asr_model.run(
            *self.augmentation.audio(batch, training=training),
            tokens=batch.tokens if self.hparams.ctc_weight < 1 else None,
            return_intermediate=training and self.hparams.inter_ctc_weight > 0,
            spec_augment=self.augmentation.features(training=training),
        )
        log_probs = self.asr_model.ctc_log_probs
        intermediate = None if encoded.intermediate is None else log_probs(encoded.intermediate)
        return Predictions(
            encoded.states,
            log_probs(encoded.states),
            intermediate,
            encoded.frame_lengths,
            encoded.logits,
        )

    def compute_objectives(self, predictions: Predictions, batch: TextBatch, stage: Stage) -> Loss:
        """Sum the losses of each utterance."""
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
        return Loss(loss.sums * batch.weights, loss.counts * batch.weights)

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        measure_on_start(self, self.asr_model.encoder.features)

    # -- evaluation ---------------------------------------------------------------------------

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Note what the batches are for."""
        super().on_stage_start(stage, epoch)
        self._stage = stage

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights to be tested; fit the decoder and confidences to the validation sets."""
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        heard = take_enough(hear(self))
        if self.decoder is not None:
            self.decoder = choose_weights(self, self.decoder, heard)
        readers = fit_readers(self, self.decoder, heard)
        share = usable_cores() // read_number(os.environ, "LOCAL_WORLD_SIZE", default="1")
        decoders = {name: None if name == GREEDY else self.decoder for name in readers}
        self._readings = {
            name: Reading(ClipReader(decoders[name], reader), processes=share)
            for name, reader in readers.items()
        }

    def score(self, predictions: Predictions, batch: TextBatch) -> list[Scored]:
        """Decode every utterance and count its errors: greedily, but for a test set."""
        log_probs, frames = predictions.log_probs, predictions.frames
        if self._stage is not Stage.TEST:
            best = greedy(log_probs, frames, self.tokenizer.vocabulary.blank)
            return self._scored([Recognized(self.tokenizer.decode(each)) for each in best], batch)
        rows = zip(log_probs.float().cpu().numpy(), frames.tolist(), strict=True)
        attending = self.attending(predictions)
        parts = zip(rows, batch.audio_lengths.tolist(), attending, strict=True)
        clips = [
            HeardClip(log_probs=row[:count], samples=samples, attention=attention)
            for (row, count), samples, attention in parts
        ]
        scored = self._scored(self._recognized(GREEDY, clips), batch)
        if self.decoder is None:
            return scored
        decoded = self._scored(self._recognized(self.decoder.kind, clips), batch)
        return [replace(each, greedy=other) for each, other in zip(decoded, scored, strict=True)]

    def attending(self, predictions: Predictions) -> Sequence[AttentionDecoder | None]:
        """Return the attention decoder of each utterance, None where it takes no part."""
        if self.decoder is None or self.decoder.attention is None:
            return [None] * len(predictions.frames)
        return attend(self.asr_model, predictions.states, predictions.frames)

    def _recognized(self, decoder: str, clips: Sequence[HeardClip]) -> list[Recognized]:
        return raise_errors(self._readings[decoder].read(clips, times=True))

    def _scored(self, found: Sequence[Recognized], batch: TextBatch) -> list[Scored]:
        """Count the errors of every utterance in what was decoded of it."""
        rate, samples = self.hparams.sample_rate, batch.audio_lengths.tolist()
        rows = zip(batch.ids, batch.texts, found, batch.speakers, samples, strict=True)
        return [
            score(
                name,
                text,
                heard.text,
                speaker=speaker,
                seconds=samples_to_seconds(count, rate),
                words=heard.words,
                by_words=self.by_words,
            )
            for name, text, heard, speaker, count in rows
        ]

    def measure(self, results: Sequence[Scored]) -> Mapping[str, float]:
        """Divide the errors of all utterances by what was said."""
        scores = total_scores(results)
        return {"CER": scores.cer, **({"WER": scores.wer} if self.by_words else {})}

    def measure_slice(self, results: Sequence[Scored]) -> Mapping[str, Any]:
        """Return both rates with their intervals."""
        return slice_error_rates(results)

    def describe(self, results: Sequence[Scored]) -> str:
        """Write both rates with their counts and intervals."""
        return describe_results(results)

    def report(self, split: str, results: Sequence[Scored], folder: Path) -> Mapping[str, Any]:
        """Write every utterance with its errors; return the counts and intervals."""
        decoder = GREEDY if self.decoder is None else self.decoder.kind
        errors = report_errors(folder, split, results)
        return {**errors, "decoder": decoder}

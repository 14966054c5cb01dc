"""Train a recognizer by CTC, optionally with an attention decoder.

Legend: B utterances, S samples, U frames, V tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.audio.augment import Augmentation
from sbkit.audio.segments import Segment, Segmenter, max_unsegmented_samples
from sbkit.bundle.protocols import Encoded
from sbkit.data.batch import TextBatch
from sbkit.decoding.beam import declared_decoder
from sbkit.decoding.greedy import merge_repeats
from sbkit.decoding.pool import RecognizedClip
from sbkit.evaluate.wer import (
    BLANK_FRAMES,
    TOKENS_WRITTEN,
    GreedyCounts,
    ScoredUtterance,
    greedy_shares,
)
from sbkit.logs.metric import Metric, Metrics
from sbkit.models.encoder import COMPOSED, ENCODER, Predictions
from sbkit.models.loss import Loss, attention_loss, ctc
from sbkit.tasks.asr.bundle import encode_in_segments
from sbkit.tasks.asr.model import AsrModel
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.transcripts import transcript_normalizer
from sbkit.train.brain import Brain

FRAME_METRICS: Metrics = dict.fromkeys((BLANK_FRAMES, TOKENS_WRITTEN), Metric(lower_is_better=None))


class AsrBrain(Brain):
    """Train CTC, and an attention decoder if `ctc_weight` is below one."""

    network: AsrModel
    parts = ("ctc_lin",)
    optional_parts = (ENCODER, *COMPOSED, "seq_lin", "linear_stack")
    metrics: ClassVar[Metrics] = {**AsrTask.metrics, **FRAME_METRICS}
    evaluates_segments = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer = self.hparams.tokenizer
        self.augmentation = Augmentation(self.hparams, features=self.network.encoder.features)
        self.decoder = declared_decoder(self.hparams.settings)  # of the test; None decodes greedily
        # Of a decoder with its own tokens, such as Whisper's; None: the decoder has those of CTC.
        self.decoder_tokenizer = self.hparams.settings.get("decoder_tokenizer")
        self.normalize = transcript_normalizer(self.text_table, self.tokenizer.tags)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
        audio, lengths = self.augmentation.augment_audio(batch, training=stage is Stage.TRAIN)
        if stage is not Stage.TRAIN and self._is_long(batch):
            return self._run_in_segments(audio, batch, stage)
        return self.run_model(audio, lengths, batch, stage)

    def _is_long(self, batch: TextBatch) -> bool:
        """Return whether a batch is one recording that is evaluated in segments, without a loss.

        Attention and CTC over so many frames would take minutes and gigabytes.
        """
        longest = max_unsegmented_samples(self.hparams.eval_batch_seconds, self.hparams.sample_rate)
        return len(batch) == 1 and int(batch.audio_lengths.max()) > longest

    def _run_in_segments(self, audio: Tensor, batch: TextBatch, stage: Stage) -> Predictions:
        """Run the model on segments of a recording (1, S), cut and joined as for a transcript."""
        no_tokens = torch.zeros(1, dtype=torch.int64)
        batch = replace(batch, decoder_tokens=batch.tokens[:, :0], decoder_token_lengths=no_tokens)

        def encode(segment: Segment) -> Encoded:
            self.watchdog.ping(stage.name.lower(), self.optimizer_step, batch.ids)
            segment_audio = audio[:, segment.start : segment.start + len(segment.samples)]
            samples = torch.tensor([len(segment.samples)])
            predictions = self.run_model(segment_audio, samples, batch, stage)
            frames = int(predictions.frame_lengths)
            log_probs = predictions.log_probs[0, :frames].float().cpu().numpy()
            return Encoded(log_probs, predictions.states[0, :frames].cpu())

        segmenter = Segmenter(self.hparams.sample_rate, self.network.samples_per_frame)
        clip = batch.audio[0].cpu().numpy()
        joined = encode_in_segments(clip, segmenter, self.tokenizer.silent_ids, encode)
        log_probs = torch.from_numpy(joined.log_probs).unsqueeze(0)
        frames = torch.tensor([log_probs.shape[1]])
        return Predictions(joined.states.unsqueeze(0), log_probs, None, frames, None)

    def run_model(
        self, audio: Tensor, audio_lengths: Tensor, batch: TextBatch, stage: Stage
    ) -> Predictions:
        """Run the model on augmented audio (B, S); in training, it masks features."""
        training = stage is Stage.TRAIN
        if self.decoder_tokenizer is not None:
            self.network.check_text_lengths(batch.decoder_token_lengths.tolist(), batch.ids)
        return self.network.run(
            audio,
            audio_lengths,
            tokens=batch.decoder_tokens if self.hparams.ctc_weight < 1 else None,
            return_intermediate=training and self.hparams.inter_ctc_weight > 0,
            spec_augment=self.augmentation.feature_augmentation(training=training),
            **batch.sides,
        )

    def compute_objectives(self, predictions: Predictions, batch: TextBatch, stage: Stage) -> Loss:
        """Interpolate the losses of each utterance, multiplied by its weight."""
        if stage is not Stage.TRAIN and self._is_long(batch):
            return Loss(torch.zeros(1), torch.zeros(1))
        vocabulary = self.tokenizer.vocabulary
        tokens = batch.tokens
        token_lengths = batch.token_lengths

        def weighted(name: str, loss: Loss) -> Loss:
            sums, counts = loss.sums * batch.weights, loss.counts * batch.weights
            return Loss(sums, counts, {name: (sums, counts)})

        def weighted_ctc(name: str, log_probs: Tensor) -> Loss:
            frame_lengths, blank = predictions.frame_lengths, vocabulary.blank
            return weighted(name, ctc(log_probs, frame_lengths, tokens, token_lengths, blank))

        loss = weighted_ctc("ctc", predictions.log_probs)
        if predictions.intermediate is not None:
            intermediate = weighted_ctc("inter_ctc", predictions.intermediate)
            loss = intermediate.interpolate(loss, own_weight=self.hparams.inter_ctc_weight)
        if (logits := predictions.logits) is not None:
            smoothing = self.hparams.label_smoothing if stage is Stage.TRAIN else 0.0
            targets, lengths = batch.decoder_tokens, batch.decoder_token_lengths
            attention = attention_loss(logits, targets, lengths, self.network.end_token, smoothing)
            attention = weighted("attention", attention)
            loss = loss.interpolate(attention, own_weight=self.hparams.ctc_weight)
        return loss if len(loss.parts) > 1 else Loss(loss.sums, loss.counts)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.encoder.features)

    # -- validation ---------------------------------------------------------------------------

    def score(self, predictions: Predictions, batch: TextBatch) -> list[ScoredUtterance]:
        blank = self.tokenizer.vocabulary.blank
        best = predictions.log_probs.argmax(-1).cpu().numpy()  # one transfer from the device
        lengths = zip(predictions.frame_lengths.tolist(), batch.token_lengths.tolist(), strict=True)
        heard: list[RecognizedClip] = []
        counts: list[GreedyCounts] = []
        for row, (num_frames, expected) in zip(best, lengths, strict=True):
            frames = row[:num_frames]
            tokens = merge_repeats(frames, blank)
            num_blank = int((frames == blank).sum())
            counts.append(GreedyCounts(num_frames, num_blank, len(tokens), expected))
            heard.append(RecognizedClip(self.tokenizer.decode(tokens)))
        if self.decoder_tokenizer is not None and predictions.logits is not None:
            written = self.network.generate(predictions.states, predictions.frame_lengths)
            heard = [
                RecognizedClip(self.normalize(self.decoder_tokenizer.decode(t))) for t in written
            ]
        pairs = zip(self.results_of(heard, batch), counts, strict=True)
        return [replace(utterance, counts_of_greedy=greedy) for utterance, greedy in pairs]

    def measure(self, results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
        return {**super().measure(results), **greedy_shares(results)}

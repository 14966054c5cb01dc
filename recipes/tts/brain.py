"""Train a synthesizer in the voice of a corpus: an aligner, an acoustic model and a vocoder.

All are trained in one step. The aligner sees the audio. Along its best path the acoustic model
learns durations, pitch, energy and features; the vocoder learns from the clips' own features.

Legend: B utterances, S samples, L symbols, U frames, F features.
"""

import logging
from typing import Any

from speechbrain import Stage

from sbkit.audio.io import FULL_SCALE
from sbkit.base.files import write_text_atomically
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import spectral_distance
from sbkit.tasks.tts.model import Synthesized, TtsModel, forward_sum_loss
from sbkit.tasks.tts.recordings import SpokenBatch
from sbkit.tasks.tts.task import TtsTask
from sbkit.train.brain import Brain

logger = logging.getLogger(__name__)


class TtsBrain(Brain):
    """Train by all losses at once, on every clip whose text matches its audio."""

    network: TtsModel
    parts = (
        *("compute_features", "aligner", "text_encoder", "adaptor", "mel_decoder"),
        *("vocoder_encoder", "vocoder_decoder"),
    )
    metrics = TtsTask.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_misaligned: dict[str, bool] = {}  # by the id of this epoch's training clips

    def on_fit_start(self) -> None:
        super().on_fit_start()
        features = self.network.compute_features
        self.measure_normalization(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: SpokenBatch, stage: Stage) -> Synthesized:
        """Align, and synthesize with the recorded durations; in training also with its pitch."""
        if stage is Stage.TRAIN:
            return self.network.resynthesize(batch, drawn_frames=self.hparams.segment_frames)
        return self.network.resynthesize(batch)

    def compute_objectives(self, outputs: Synthesized, batch: SpokenBatch, stage: Stage) -> Loss:
        """Sum the losses over the frames of each utterance, for the mean per frame."""
        settings = self.hparams
        frames = outputs.frames.to(outputs.mask.device)
        acoustic = ((outputs.features - outputs.target).abs().mean(2) * outputs.mask).sum(1)
        mask = outputs.symbol_mask
        durations = outputs.durations
        timing = (outputs.log_durations.exp() - durations * outputs.log_durations) * mask
        square = (outputs.predicted_variances - outputs.variances).square().sum(2) * durations
        acoustic = acoustic + settings.duration_weight * timing.sum(1)
        acoustic = acoustic + settings.variance_weight * square.sum(1)
        alignment = forward_sum_loss(outputs.alignment, outputs.frames, batch.symbol_lengths)
        lengths = outputs.segment_lengths.to(frames.device)
        spectral = spectral_distance(outputs.decoded, outputs.segment, lengths)
        vocoder = frames * (outputs.distance + spectral / lengths)
        sums = acoustic * ~outputs.is_misaligned + settings.align_weight * alignment + vocoder
        if stage is Stage.TRAIN:
            is_misaligned = zip(batch.ids, outputs.is_misaligned.tolist(), strict=True)
            self._is_misaligned.update(is_misaligned)
        return Loss(sums * batch.weights, frames * batch.weights)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """After a training epoch, list the clips whose text does not match their audio."""
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is not Stage.TRAIN:
            return
        clips = {
            id: is_misaligned
            for share in gather_over_ranks(self._is_misaligned)
            for id, is_misaligned in share.items()
        }
        self._is_misaligned = {}
        misaligned = sorted(id for id, is_misaligned in clips.items() if is_misaligned)
        if rank() == 0 and self.run_folder is not None and clips:
            file = self.run_folder / "misaligned.tsv"
            write_text_atomically(file, "".join(f"{id}\n" for id in ["id", *misaligned]))
            if epoch == self.hparams.epoch_counter.limit:
                logger.info(
                    f"{len(misaligned)} of {len(clips)} training clips are misaligned, and were "
                    f"not used for training (see {file})"
                )

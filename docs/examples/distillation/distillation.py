"""Distillation: a recognizer learns the transcripts, and the frames of a larger one, its teacher.

The teacher is a bundle of the same tokenizer. It hears the same augmented audio, without masks.
Source: Hinton et al. 2015, arXiv 1503.02531. Legend: B utterances, S samples, U frames, V tokens.
"""

from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import kl_div

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit import ConfigError, Loss, load_bundle
from sbkit.audio.lengths import length_mask
from sbkit.data.batch import TextBatch
from sbkit.tasks.asr.bundle import as_recognizer


class DistillationBrain(AsrBrain):
    """Add the divergence from the teacher's frames to the loss of the transcripts."""

    helpers = ("teacher",)  # frozen: on the device of the run, in no checkpoint and no bundle

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        bundle = as_recognizer(load_bundle(self.hparams.teacher))
        if bundle.tokenizer.pieces() != self.tokenizer.pieces():
            raise ConfigError(
                f"`teacher`: {self.hparams.teacher} has other tokens than this run. Copy its "
                "tokenizer.model into the run folder before the run starts."
            )
        rates = [bundle.config.sample_rate, self.hparams.sample_rate]
        frames = [model.encoder.subsampling for model in (bundle.model.network, self.network)]
        if rates[0] != rates[1] or frames[0] != frames[1]:
            raise ConfigError(f"`teacher`: {self.hparams.teacher} has frames of another length.")
        self.teacher = bundle.model.requires_grad_(False)

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Any:
        """Return the predictions of a batch; in training also those of the teacher, (B, U, V)."""
        if stage is not Stage.TRAIN:
            return super().compute_forward(batch, stage)
        audio, lengths = self.augmentation.augment_audio(batch, training=True)
        with torch.no_grad():
            targets, _ = self.teacher(audio, lengths)  # with the frames of zeros after each clip
        return self.run_model(audio, lengths, batch, stage), targets

    def compute_objectives(self, predictions: Any, batch: TextBatch, stage: Stage) -> Loss:
        if stage is not Stage.TRAIN:
            return super().compute_objectives(predictions, batch, stage)
        predictions, targets = predictions
        loss = super().compute_objectives(predictions, batch, stage)
        temperature = self.hparams.temperature
        divergence = divergence_from(
            targets / temperature, predictions.log_probs / temperature, predictions.frame_lengths
        )
        # The square keeps the size of the gradient.
        divergence = temperature**2 * divergence.where(loss.counts > 0, 0)
        of_teacher = Loss(divergence, loss.counts, {"divergence": (divergence, loss.counts)})
        return loss.interpolate(of_teacher, own_weight=1 - self.hparams.teacher_weight)


def divergence_from(targets: Tensor, scores: Tensor, frame_lengths: Tensor) -> Tensor:
    """Sum the divergence of scores from targets over an utterance's frames: (B, U, V) -> (B,)."""
    frames = int(frame_lengths.max())
    targets, scores = (x[:, :frames].log_softmax(-1) for x in (targets, scores))
    divergence = kl_div(scores, targets, reduction="none", log_target=True).sum(2)  # (B, U)
    return divergence.where(length_mask(frame_lengths, frames, scores.device), 0).sum(1)


class Distillation(AsrRecipe):
    """Train a recognizer with a teacher."""

    brain = DistillationBrain

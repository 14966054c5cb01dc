"""Consistency-regularized CTC: training sees two views of each batch, which learn to agree.

The views share speed and waveform augmentation, and have masks and dropout of their own.
Source: Yao et al. 2025, arXiv 2410.05101.
"""

from typing import Any

from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import kl_div

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.audio.lengths import length_mask
from sbkit.data.batch import TextBatch
from sbkit.models.encoder import Predictions
from sbkit.models.loss import Loss


class TwoViewsBrain(AsrBrain):
    """Add the divergence of both views to the mean of their losses."""

    def compute_forward(self, batch: TextBatch, stage: Stage) -> Any:
        """Return the predictions of a batch, and in training a pair of them."""
        if stage is not Stage.TRAIN:
            return super().compute_forward(batch, stage)
        audio, lengths = self.augmentation.augment_audio(batch, training=True)
        return tuple(self.run_model(audio, lengths, batch, stage) for _ in range(2))

    def compute_objectives(self, predictions: Any, batch: TextBatch, stage: Stage) -> Loss:
        if stage is not Stage.TRAIN:
            return super().compute_objectives(predictions, batch, stage)
        first, second = predictions
        loss = super().compute_objectives(first, batch, stage)
        other = super().compute_objectives(second, batch, stage)
        mean = loss.interpolate(other, own_weight=0.5)
        divergence = divergence_of(first, second).where(mean.counts > 0, 0)
        sums = mean.sums + self.hparams.consistency_weight * divergence
        return Loss(sums, mean.counts, {**mean.parts, "divergence": (divergence, mean.counts)})


def divergence_of(first: Predictions, second: Predictions) -> Tensor:
    """Sum both Kullback-Leibler divergences, halved, over the frames of each utterance: -> (B,).

    The target of each has no gradient.
    """
    p, q = first.log_probs, second.log_probs  # (B, U, V)
    to_second = kl_div(p, q.detach(), reduction="none", log_target=True)
    to_first = kl_div(q, p.detach(), reduction="none", log_target=True)
    mask = length_mask(first.frame_lengths, p.shape[1], p.device)
    return 0.5 * (to_second + to_first).sum(2).where(mask, 0).sum(1)


class TwoViews(AsrRecipe):
    """Train a recognizer on two views."""

    brain = TwoViewsBrain

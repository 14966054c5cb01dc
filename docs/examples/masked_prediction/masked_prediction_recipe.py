"""The pretraining of `masked_prediction.py` on audio without transcripts; its legend holds here."""

from typing import Any

import torch
from masked_prediction import MaskedPrediction, MaskedPredictor
from speechbrain import Stage
from torch import Tensor
from torch.nn import functional as F

from recipes.prepare import CorpusRecipe
from sbkit.audio.augment import speed_perturb
from sbkit.audio.random_draws import draw_uniform
from sbkit.data.batch import Batch
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain


class MaskedBrain(Brain):
    """Train the log-probability of the right codes in masked frames."""

    network: MaskedPredictor
    parts = ("compute_features", "CNN", "Transformer", "quantizer", "code_lin")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.features)

    def compute_forward(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor]:
        """Return the loss of each frame, and 1 where all its features are masked: 2 x (B, U)."""
        audio = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        features, lengths = self.network.features(*audio)
        positions = torch.arange(features.shape[1])
        width = self.hparams.mask_width  # every other span of a test is masked
        masks = (positions // width % 2).expand(features.shape[:2])
        if stage is Stage.TRAIN:
            starts = (draw_uniform(*features.shape[:2]) < self.hparams.mask_prob).float()
            masks = F.max_pool1d(F.pad(starts, (width - 1, 0)), width, stride=1)
        masks = (masks * (positions < lengths.cpu().unsqueeze(1))).to(features.device)
        losses = self.network.losses(features, lengths, masks > 0)
        padded = F.pad(masks, (0, losses.shape[1] * self.hparams.subsampling - masks.shape[1]))
        return losses, padded.view(*losses.shape, -1).amin(2)

    def compute_objectives(self, outputs: Any, batch: Batch, stage: Stage) -> Loss:
        losses, masked = outputs
        return Loss((losses * masked).sum(1) * batch.weights, masked.sum(1) * batch.weights)


class Pretraining(CorpusRecipe):
    """Train on the audio of any corpus."""

    task = MaskedPrediction()
    brain = MaskedBrain

"""A classifier of utterances: encoder -> pooling -> label_lin.

Legend: B utterances, S samples, U frames of the encoder, D model width, V classes.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.augment import AugmentFeatures
from sbkit.audio.lengths import length_mask
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import POSITIVE_COUNT
from sbkit.models.asr import head_size
from sbkit.models.encoder import AcousticModel, make_encoder
from sbkit.models.parts import check_signature

MIN_VARIANCE = 1e-5  # the gradient of a square root is unbounded at zero


class UtteranceClassifier(AcousticModel):
    """Score one of several classes for each utterance."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        num_classes: int,
        pooling: nn.Module,
        label_lin: nn.Module,
        encoder: nn.Module | None = None,
        compute_features: nn.Module | None = None,
        CNN: nn.Module | None = None,
        Transformer: nn.Module | None = None,
    ) -> None:
        parts = {"encoder": encoder, "compute_features": compute_features}
        super().__init__(
            model=model,
            encoder=make_encoder({**parts, "CNN": CNN, "Transformer": Transformer}),
            heads={"pooling": pooling, "label_lin": label_lin},
        )
        check_signature("pooling", pooling)
        outputs = head_size(label_lin)
        if outputs != num_classes:
            raise ConfigError(
                f"`label_lin` has {outputs} outputs for {num_classes} classes. Correct its "
                "out_features."
            )
        self.num_classes = num_classes
        self.pooling = pooling
        self.label_lin = label_lin

    def predict(
        self, audio: Tensor, audio_lengths: Tensor, spec_augment: AugmentFeatures | None = None
    ) -> Tensor:
        """Score every class, in float32: (B, S), (B,) -> (B, V) log-probabilities."""
        inputs = self.encoder.inputs(audio, audio_lengths, spec_augment)
        scores: Tensor = self.label_lin(self.pooling(*self.encoder.backbone(*inputs)))
        return scores.float().log_softmax(-1)


class AttentiveStatisticsPooling(nn.Module):
    """Return mean and deviation of frames, weighted by attention: (B, U, D), (B,) -> (B, 2D).

    They are computed in float32. Frames past the end of an utterance have weight 0, so padding
    changes nothing. An utterance without frames becomes zeros.
    Source: Okabe et al. 2018, equations 2 to 7.
    """

    RANGES: ClassVar = dict.fromkeys(("d_model", "attention_dim"), POSITIVE_COUNT)

    def __init__(self, *, d_model: int, attention_dim: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Linear(d_model, attention_dim), nn.Tanh(), nn.Linear(attention_dim, 1)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)  # (B, U, 1), true within
        scores = self.attention(x).float().masked_fill(~mask, -torch.inf)
        weights = scores.softmax(1).masked_fill(~mask, 0.0)  # without frames: 0, not 0 / 0
        x = x.float().masked_fill(~mask, 0.0)
        mean = (weights * x).sum(1)
        variance = (weights * (x - mean.unsqueeze(1)).square()).sum(1)
        has_frames = mask.any(1)  # (B, 1)
        return torch.cat([mean, variance.clamp(min=MIN_VARIANCE).sqrt() * has_frames], dim=-1)

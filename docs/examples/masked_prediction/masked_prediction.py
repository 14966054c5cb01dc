"""Predict the codes of masked frames, without labels: model and task of BEST-RQ (Chiu et al. 2022).

B utterances, S samples, T features, M mel bins, U frames of the encoder, V codes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbkit.audio.lengths import length_mask
from sbkit.bundle.task import Task
from sbkit.models.encoder import AcousticModel, FeatureEncoder


class RandomQuantizer(nn.Module):
    """Name the code nearest to each frame, by random constants: (B, T, M), (B,) -> (B, U)."""

    projection: Tensor
    codes: Tensor

    def __init__(self, *, n_mels: int, subsampling: int, num_codes: int, code_width: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(subsampling * n_mels, code_width))
        self.register_buffer("codes", F.normalize(torch.randn(num_codes, code_width), dim=1))

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        mask = length_mask(lengths, features.shape[1], features.device).unsqueeze(2)  # (B, T, 1)
        counts = mask.sum(1, keepdim=True).clamp(min=1)
        x = (features - features.sum(1, keepdim=True) / counts) * mask
        x = x * (x.square().sum(1, keepdim=True) / counts + 1e-5).rsqrt()
        x = F.pad(x, (0, 0, 0, -x.shape[1] % (len(self.projection) // x.shape[2])))
        x = x.reshape(len(x), -1, len(self.projection))  # several frames, side by side
        with torch.autocast(x.device.type, enabled=False):  # the codes depend on no precision
            return (F.normalize(x @ self.projection, dim=2) @ self.codes.mT).argmax(2)


class MaskedPredictor(AcousticModel):
    """Score the codes of each frame: encoder -> code_lin."""

    def __init__(
        self, *, model: nn.ModuleList, quantizer: nn.Module, code_lin: nn.Module, **parts: Any
    ) -> None:
        encoder, heads = FeatureEncoder(parts), {"quantizer": quantizer, "code_lin": code_lin}
        super().__init__(model=model, encoder=encoder, heads=heads)
        self.features, self.encode_features = encoder.features, encoder.encode_features
        self.quantizer, self.code_lin = quantizer, code_lin

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Compute log-probabilities in float32: (B, S), (B,) -> (B, U, V)."""
        return F.log_softmax(self.code_lin(self.encode(audio, audio_lengths)[0]).float(), 2)

    def losses(self, features: Tensor, lengths: Tensor, is_masked: Tensor) -> Tensor:
        """Compute the loss of each frame: (B, T, M), (B,), (B, T) -> (B, U)."""
        seen = features.masked_fill(is_masked.unsqueeze(2), 0.0)  # the mean, by `level: utterance`
        codes = self.quantizer(features, lengths)
        scores = self.code_lin(self.encode_features(seen, lengths)[0])[:, : codes.shape[1]]
        return F.cross_entropy(scores.float().mT, codes, reduction="none")


class MaskedPrediction(Task):
    """Which codes the masked frames have."""

    model_name = "pretrained encoder"

    def model_class(self) -> type[MaskedPredictor]:
        return MaskedPredictor

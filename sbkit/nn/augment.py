"""Augmentation on the device: speed on the audio, SpecAugment on the features.

Legend: B utterances, S samples, T frames, M mel bins.
All draws come from torch's generator, which the Brain seeds before every micro-batch.
"""

import torch
import torchaudio.functional
from torch import Tensor, nn

from sbkit.tensors.lengths import length_mask
from sbkit.values.errors import SbkitError


class SpeedPerturb(nn.Module):
    """Play a batch faster or slower by one of several speeds: (B, S), (B,) -> (B, S'), (B,).

    Resampling changes tempo and pitch together (Ko et al. 2015). One speed a batch: one kernel.
    """

    def __init__(self, *, speeds: list[float]) -> None:
        super().__init__()
        self._percents = [round(100 * speed) for speed in speeds]
        exact = [percent / 100 for percent in self._percents]
        if not exact or min(exact) <= 0 or exact != list(speeds):
            raise SbkitError(
                "`speeds` must be one or more positive numbers with at most two decimals, but is "
                f"{speeds}. Write [1.0] to leave the speed alone."
            )

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a speed and resample."""
        percent = self._percents[int(torch.randint(len(self._percents), ()))]
        if percent == 100:
            return audio, lengths
        # Small integers make a small polyphase kernel: 110 % is 11:10, not 17600:16000.
        faster = torchaudio.functional.resample(audio.float(), percent, 100)
        lengths = torch.div(lengths * 100, percent, rounding_mode="floor")
        return faster * length_mask(lengths, faster.shape[1]), lengths  # the filter rings beyond


class SpecAugment(nn.Module):
    """Hide random stretches of time and bands of frequency: (B, T, M), (B,) -> (B, T, M).

    What is hidden becomes the batch's mean of the bin, which is zero after normalization.
    Source: Park et al. 2019; the width of a time mask is at most ``time_share`` of the utterance.
    """

    def __init__(
        self,
        *,
        time_masks: int = 2,
        time_width: int = 40,
        time_share: float = 0.2,
        freq_masks: int = 2,
        freq_width: int = 27,
    ) -> None:
        super().__init__()
        self.time_masks, self.time_width, self.time_share = time_masks, time_width, time_share
        self.freq_masks, self.freq_width = freq_masks, freq_width

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Draw the masks of every utterance and fill them."""
        batch, frames, bins = features.shape
        hidden = torch.zeros(batch, frames, bins, dtype=torch.bool, device=features.device)
        widest = (lengths * self.time_share).floor().clamp(max=self.time_width)
        for _ in range(self.time_masks):
            hidden |= _stretch(widest, lengths, frames).unsqueeze(2)
        widest = torch.full_like(lengths, self.freq_width)
        for _ in range(self.freq_masks):
            hidden |= _stretch(widest, torch.full_like(lengths, bins), bins).unsqueeze(1)
        inside = length_mask(lengths, frames).unsqueeze(2)
        mean = (features * inside).sum((0, 1)) / lengths.sum()
        return torch.where(hidden & inside, mean, features)


def _stretch(widest: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Mark one stretch a row, of a width and a place drawn evenly: (B,), (B,) -> (B, size)."""
    draws = torch.rand(2, len(lengths), device=lengths.device)
    width = draws[0] * widest
    start = draws[1] * (lengths - width)
    positions = torch.arange(size, device=lengths.device)
    return (positions >= start.unsqueeze(1)) & (positions < (start + width).unsqueeze(1))

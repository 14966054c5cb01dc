"""Augmentation on the device: speed and `wave_augment` on the audio, `spec_augment` on features.

Legend: B utterances, S samples, T frames, M mel bins.
Masks are drawn by utterance (`sbkit/audio/draws.py`); the speeds were drawn when the epoch was
planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchaudio.transforms import Resample

from sbkit.audio.draws import draw_uniform
from sbkit.audio.lengths import length_mask
from sbkit.base.errors import SbkitError
from sbkit.config.ranges import AT_LEAST_NONE, SHARE


class Augmentation:
    """The augmentation that a YAML declares, of any task with audio; but for speed, in training.

    Raises SbkitError for SpeechBrain's, and for `spec_augment` of a model without features.
    """

    def __init__(self, hparams: Any, *, features: object | None) -> None:
        """Take `wave_augment` and `spec_augment` of a Brain's hparams; both may be missing.

        ``features``: what computes them, None for a model without.
        """
        self._wave, self._spec = (
            _augmentation(hparams, key) for key in ("wave_augment", "spec_augment")
        )
        if self._spec is not None and features is None:
            raise SbkitError(
                "`spec_augment` must have features to hide, but this model's `encoder` takes "
                "audio. Take it out, and let the encoder hide its own; `wave_augment` works as it "
                "does for any model."
            )

    def audio(self, batch: Any, *, training: bool) -> tuple[Tensor, Tensor]:
        """Return the audio of a batch at its speeds, as float, augmented: (B, S), (B,)."""
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        audio = audio.float()
        if training and self._wave is not None:
            audio, lengths = self._wave(audio, lengths)
        return audio, lengths

    def features(self, *, training: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return what hides parts of the features: (B, T, M), (B,) -> (B, T, M)."""
        return self._spec if training else None


def _augmentation(hparams: Any, key: str) -> Callable[..., Any] | None:
    part: Callable[..., Any] | None = getattr(hparams, key, None)
    called = getattr(part, "forward", part)
    if called is not None and called.__module__.startswith("speechbrain."):
        raise SbkitError(
            f"`{key}` must take lengths in samples or frames, but SpeechBrain's takes fractions. "
            "Wrap it in a module with forward(x, lengths)."
        )
    return part


@dataclass(frozen=True, slots=True)
class SpeedGroup:
    """A run of utterances that are played at one speed; longest: samples before that."""

    percent: int
    utterances: int
    longest: int


def speed_perturb(
    audio: Tensor, lengths: Tensor, speed_groups: Sequence[SpeedGroup]
) -> tuple[Tensor, Tensor]:
    """Play utterances faster or slower: (B, S), (B,) -> (B, S'), (B,).

    Resampling changes tempo and pitch together (Ko et al. 2015). How long everything becomes is
    known to the host, which waits for nothing.
    """
    if all(group.percent == 100 for group in speed_groups):
        return audio, lengths
    counts = [group.utterances for group in speed_groups]
    parts = [
        _at_speed(clips[:, : group.longest], counted, group.percent)
        for group, clips, counted in zip(
            speed_groups, torch.split(audio, counts), torch.split(lengths, counts), strict=True
        )
    ]
    longest = max(clips.shape[1] for clips, _ in parts)
    padded = [pad(clips, (0, longest - clips.shape[1])) for clips, _ in parts]
    return torch.cat(padded), torch.cat([counted for _, counted in parts])


def _at_speed(audio: Tensor, lengths: Tensor, percent: int) -> tuple[Tensor, Tensor]:
    if percent == 100:
        return audio.float(), lengths
    faster = resampler(percent, audio.device)(audio.float())
    lengths = torch.div(lengths * 100, percent, rounding_mode="floor")
    mask = length_mask(lengths, faster.shape[1], faster.device)  # true within
    return faster * mask, lengths  # the filter rings beyond


@lru_cache
def resampler(percent: int, device: torch.device) -> nn.Module:
    """Make what plays audio at a speed, once: torchaudio makes the host wait for its kernel."""
    # Small integers make a small polyphase kernel: 110 % is 11:10, not 17600:16000.
    made: nn.Module = Resample(percent, 100, dtype=torch.float32)
    return made.to(device, non_blocking=True)


class Compose(nn.Module):
    """Apply augmentations of audio one after another: (B, S), (B,) -> (B, S), (B,).

    Each part has forward(audio, lengths) -> (audio, lengths), keeps the shape, and leaves what
    lies past the end of an utterance zero.
    """

    def __init__(self, *, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the parts in their order."""
        for part in self.parts:
            audio, lengths = part(audio, lengths)
        return audio, lengths


class SpecAugment(nn.Module):
    """Hide random stretches of time and bands of frequency: (B, T, M), (B,) -> (B, T, M).

    What is hidden becomes the utterance's mean of the bin. An utterance's masks are the same in any
    batch.
    Source: Park et al. 2019; a time mask is at most ``max_time_fraction`` of the utterance.
    """

    RANGES: ClassVar = {
        **dict.fromkeys(("time_masks", "time_width", "freq_masks", "freq_width"), AT_LEAST_NONE),
        "max_time_fraction": SHARE,
    }

    def __init__(
        self,
        *,
        time_masks: int = 2,
        time_width: int = 40,
        max_time_fraction: float = 0.2,
        freq_masks: int = 2,
        freq_width: int = 27,
    ) -> None:
        super().__init__()
        self.time_masks, self.time_width = time_masks, time_width
        self.max_time_fraction = max_time_fraction
        self.freq_masks, self.freq_width = freq_masks, freq_width

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Draw the masks of every utterance and fill them."""
        _, frames, bins = features.shape
        widest = (lengths * self.max_time_fraction).floor().clamp(max=self.time_width)
        device, masks = features.device, self.time_masks + self.freq_masks
        draws = draw_uniform(len(lengths), 2, masks).to(lengths.device).unbind(2)
        times, bands = (
            torch.zeros(1, size, dtype=torch.bool, device=device) for size in (frames, bins)
        )
        for draw in draws[: self.time_masks]:
            times = times | _random_spans(draw, widest, lengths, frames, device)
        widest, whole = torch.full_like(lengths, self.freq_width), torch.full_like(lengths, bins)
        for draw in draws[self.time_masks :]:
            bands = bands | _random_spans(draw, widest, whole, bins, device)
        hidden = times.unsqueeze(2) | bands.unsqueeze(1)
        mask = length_mask(lengths, frames, device).unsqueeze(2)  # true within
        counts = lengths.clamp(min=1).to(device, non_blocking=True).view(-1, 1, 1)
        mean = (features * mask).sum(1, keepdim=True) / counts
        return torch.where(hidden & mask, mean, features)


def _random_spans(
    draws: Tensor, widest: Tensor, lengths: Tensor, size: int, device: torch.device
) -> Tensor:
    """Mark one stretch a row, by two draws below 1: (B, 2), (B,), (B,) -> (B, size).

    Every width from 0 to ``widest`` is equally likely, and then every place inside.
    """
    width = (draws[:, 0] * (widest + 1)).floor()
    start = (draws[:, 1] * (lengths - width + 1)).floor()
    edges = torch.stack([start, start + width]).to(device, non_blocking=True).unsqueeze(2)
    positions = torch.arange(size, device=device)
    return (positions >= edges[0]) & (positions < edges[1])

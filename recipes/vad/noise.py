"""Clips in silence and noise, on the device of the audio.

Legend: B utterances, S samples, U windows of 20 ms.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

STEEPEST = 2.0  # of coloured noise: brown; 0 is white, 1 pink
TALKERS = (4, 12)  # of babble, at least and at most
BABBLE = 0.6  # the share of noises that is babble


class Spoken(NamedTuple):
    """Audio (B, S), and which of its windows are speech (B, U)."""

    audio: Tensor
    speech: Tensor


def in_silence(audio: Tensor, speech: Tensor, lead: Tensor, *, more: int, window: int) -> Spoken:
    """Put ``lead`` (B,) windows before each clip, and the rest of ``more`` after it.

    Takes audio (B, S) and speech (B, U), zero past each length; ``window``: its samples.
    """
    audio = pad(audio, (0, more * window + -audio.shape[1] % window))
    windows = audio.view(len(audio), -1, window)  # (B, U', 320)
    speech = pad(speech, (0, windows.shape[1] - speech.shape[1]))
    places = torch.arange(windows.shape[1], device=audio.device) - lead.unsqueeze(1)
    places = places % windows.shape[1]
    placed = windows.gather(1, places.unsqueeze(2).expand_as(windows)).flatten(1)
    return Spoken(placed, speech.gather(1, places))


def draw_level(audio: Tensor, low: float, high: float) -> Tensor:
    """Amplify each clip by a drawn gain, in dB: (B, S) -> (B, S)."""
    gain = 10 ** ((low + torch.rand(len(audio), 1) * (high - low)) / 20)
    return audio * gain.to(audio.device)


def draw_noise(spoken: Spoken) -> Tensor:
    """Draw for each clip coloured noise, or babble of the speech of the batch: -> (B, S)."""
    audio, speech = spoken
    noise = coloured(torch.randn(audio.shape[1]), STEEPEST * float(torch.rand(()))).to(audio.device)
    windows = audio.view(*speech.shape, -1)
    level = windows.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-3)
    said = (windows / level)[speech].flatten()  # without silence, one clip after the other
    talkers = int(torch.randint(TALKERS[0], TALKERS[1] + 1, ()))
    starts = torch.randint(max(1, len(said)), (talkers,)).tolist()
    places = torch.arange(audio.shape[1], device=audio.device)
    babble = sum(said[(places + start) % len(said)] for start in starts) if len(said) else noise
    is_babble = torch.rand(len(audio), 1).to(audio.device) < BABBLE
    return torch.where(is_babble, babble, noise)


def coloured(white: Tensor, slope: float) -> Tensor:
    """Make the power of noise (S,) fall with the frequency to a power: 1 for pink noise."""
    spectrum = torch.fft.rfft(white)
    places = torch.arange(1, len(spectrum) + 1)
    noise: Tensor = torch.fft.irfft(spectrum / places ** (slope / 2), n=len(white))
    return noise


def add_noise(spoken: Spoken, noise: Tensor, snr_db: Tensor) -> Tensor:
    """Add noise (B, S), so many dB (B,) below the speech of each clip: -> (B, S)."""
    audio, speech = spoken
    within = speech.repeat_interleave(audio.shape[1] // speech.shape[1], 1)  # (B, S)
    power = (audio.square() * within).sum(1) / within.sum(1).clamp(min=1)
    wanted = power / 10 ** (snr_db.to(audio.device) / 10)
    gain = (wanted / noise.square().mean(1).clamp(min=1e-9)).sqrt()
    return audio + gain.unsqueeze(1) * noise

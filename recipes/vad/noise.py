"""Clips in silence and noise, on the device of the audio.

Legend: B utterances, S samples, U windows of 20 ms, K colors, N samples of a noise.

Levels are those of the features' band, and of a clip's own samples: below its lowest frequency
pink and brown noise have most of their power, which nothing hears.
"""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sbkit.audio.fbank import MIN_HZ

SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)  # of colored noise: white to brown
MIN_TALKERS, MAX_TALKERS = 4, 12  # of babble
BABBLE_SHARE = 0.6  # of noises
NOISE_DRAWS = 2 + MAX_TALKERS
NOISE_SAMPLES = 1 << 20


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


def color(white: Tensor, slope: float, sample_rate: int) -> Tensor:
    """Make the power of noise (S,) fall with the frequency to a power, and 1 in all.

    Nothing is left below the band of the features.
    """
    spectrum = torch.fft.rfft(white)
    hertz = torch.fft.rfftfreq(len(white), 1 / sample_rate)
    weights = hertz.clamp(min=MIN_HZ) ** (-slope / 2) * (hertz >= MIN_HZ)
    noise: Tensor = torch.fft.irfft(spectrum * weights, n=len(white))
    return noise / noise.square().mean().sqrt()


def make_colored(sample_rate: int) -> Tensor:
    """Make a noise of each slope: (K, N), the same each time."""
    white = torch.randn(NOISE_SAMPLES, generator=torch.Generator().manual_seed(0))
    return torch.stack([color(white, slope, sample_rate) for slope in SLOPES])


def make_voices(clips: Iterable[Tensor], sample_rate: int) -> Tensor:
    """Put the speech (S,) of clips one after the other, at one level: -> (N,)."""
    parts = [color(clip, 0.0, sample_rate) for clip in clips if len(clip)]
    return torch.cat([torch.zeros(0), *parts])


def take_noise(colored: Tensor, voices: Tensor, draws: Tensor, samples: int) -> Tensor:
    """Take colored noise or babble for each clip: (K, N), (N',), (B, NOISE_DRAWS) -> (B, S).

    draws: below 1, on the CPU. Without voices there is no babble.
    """
    noises = []
    for kind, choice, *starts in draws.tolist():
        if len(voices) and kind < BABBLE_SHARE:
            talkers = MIN_TALKERS + int(choice * (MAX_TALKERS - MIN_TALKERS + 1))
            parts = [_part(voices, int(at * len(voices)), samples) for at in starts[:talkers]]
            noises.append(reduce(torch.add, parts))
        else:
            noise = colored[int(choice * len(colored))]
            noises.append(_part(noise, int(starts[0] * len(noise)), samples))
    return torch.stack(noises)


def _part(noise: Tensor, start: int, samples: int) -> Tensor:
    """Return so many samples; after its end a noise begins again."""
    part = noise[start : start + samples]
    missing = samples - len(part)
    return torch.cat([part, _part(noise, 0, missing)]) if missing else part


def add_noise(spoken: Spoken, noise: Tensor, snr_db: Tensor, mask: Tensor) -> Tensor:
    """Add noise (B, S), so many dB (B,) below the speech of each clip: -> (B, S).

    mask (B, S): true within a clip. The power of speech is without the mean of each window, which
    the features are computed without.
    """
    audio, speech = spoken
    levels = audio.view(*speech.shape, -1).var(2, correction=0)  # (B, U)
    power = (levels * speech).sum(1) / speech.sum(1).clamp(min=1)
    noise = noise * mask
    given = noise.square().sum(1) / mask.sum(1)
    gain = (power / 10 ** (snr_db / 10) / given.clamp(min=1e-9)).sqrt()
    return audio + gain.unsqueeze(1) * noise

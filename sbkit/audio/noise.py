"""Noise and reverberation from folders of the user's, on the device of the audio.

Legend: B utterances, S samples, N clips of a folder.

Draws are by utterance (`sbkit/audio/draws.py`) and levels are of an utterance's own samples,
so nothing depends on the batch. The files are read once, when the first utterance is to be
augmented, and stay on the device; after that the host waits for nothing. Of a folder of more than
1,800 files so many are taken, evenly. In a YAML:

    add_noise: !new:sbkit.audio.noise.AddNoise
        folder: /data/musan/noise
        snr_db: [5, 20]
        prob: 0.5
        sample_rate: !ref <sample_rate>
    add_reverb: !new:sbkit.audio.noise.AddReverb
        folder: /data/rirs
        prob: 0.3
        sample_rate: !ref <sample_rate>
    wave_augment: !new:sbkit.audio.augment.Compose
        parts: [!ref <add_reverb>, !ref <add_noise>]
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sbkit.audio.draws import draw_uniform
from sbkit.audio.io import SUFFIXES, audio_below, read_audio
from sbkit.audio.lengths import bucket_of, length_mask
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.ranges import SHARE

LONGEST_TOTAL = 3600  # seconds kept on a device, 115 MB of noise; each file gives an equal part
LONGEST_IMPULSE = 2  # seconds of a room's impulse response
MOST_FILES = LONGEST_TOTAL // LONGEST_IMPULSE  # a shorter piece of noise would repeat audibly


class Clips(NamedTuple):
    """Clips one after another: samples (sum of lengths,) of int16, starts (N,), lengths (N,)."""

    samples: Tensor
    starts: Tensor
    lengths: Tensor


class FromFolder(nn.Module):
    """What adds the sound of files of a folder to utterances, each with a chance of ``prob``.

    Attributes:
        files: those that are taken, evenly.
    """

    RANGES: ClassVar = {"prob": SHARE}

    def __init__(self, *, folder: str, prob: float = 0.3, sample_rate: int = SAMPLE_RATE) -> None:
        super().__init__()
        found = audio_below(Path(folder))
        if not found:
            raise SbkitError(
                f"The folder of noises or rooms must hold audio files ({', '.join(SUFFIXES[:6])} "
                f"...), but {folder} holds none. Correct `folder`."
            )
        taken = min(len(found), MOST_FILES)
        self.files = tuple(found[place * len(found) // taken] for place in range(taken))
        self.prob, self.sample_rate = prob, sample_rate


class AddNoise(FromFolder):
    """Add noise of a drawn signal-to-noise ratio: (B, S), (B,) -> (B, S), (B,).

    The ratio is that of the powers over the utterance's own length. Each utterance is left as it is
    with a chance of 1 - ``prob``, and where it or the noise is silent. A noise starts at a drawn
    place and repeats as often as needed. The result is float in int16's scale, and is not clipped.
    """

    def __init__(
        self,
        *,
        folder: str,
        snr_db: Sequence[float] = (5, 20),
        prob: float = 0.5,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        super().__init__(folder=folder, prob=prob, sample_rate=sample_rate)
        self.low, self.high = map(float, snr_db)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a noise, a place in it and a ratio for every utterance, and add it."""
        draws = draw_uniform(len(lengths), 4).to(audio.device, non_blocking=True).T
        share = LONGEST_TOTAL / len(self.files)
        clips = read_clips(self.files, self.sample_rate, share, audio.device)
        chosen = (draws[0] * len(clips.lengths)).long()  # (B,)
        length = clips.lengths[chosen].unsqueeze(1)
        first = (draws[1].unsqueeze(1) * length).long()
        places = (first + torch.arange(audio.shape[1], device=audio.device)) % length
        noise = clips.samples[clips.starts[chosen].unsqueeze(1) + places].float()  # (B, S)
        mask = length_mask(lengths, audio.shape[1], audio.device)
        audio, noise = audio.float(), noise * mask
        ratio = 10 ** ((self.low + draws[2] * (self.high - self.low)) / 10)
        wanted = (audio * mask).square().sum(1) / ratio  # the noise's energy, (B,)
        given = noise.square().sum(1)
        gain = (wanted / given.clamp(min=1.0)).sqrt() * ((draws[3] < self.prob) & (given > 0))
        return audio + gain.unsqueeze(1) * noise, lengths


class AddReverb(FromFolder):
    """Convolve with a drawn room's impulse response: (B, S), (B,) -> (B, S), (B,).

    The direct sound stays in its place and the power of the utterance stays what it was. What
    rings past the end of an utterance is cut. Source: Ko et al. 2017.
    """

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a room for every utterance, and convolve in the frequency domain."""
        draws = draw_uniform(len(lengths), 2).to(audio.device, non_blocking=True).T
        rooms = read_rooms(self.files, self.sample_rate, audio.device)  # (N, R)
        room = rooms[(draws[0] * len(rooms)).long()]
        mask = length_mask(lengths, audio.shape[1], audio.device)
        audio = audio.float()
        with torch.autocast(audio.device.type, enabled=False):
            # One of few sizes: CUDA keeps a plan of each, in memory that torch does not see.
            size = bucket_of(audio.shape[1] + room.shape[1] - 1)
            spectrum = torch.fft.rfft(audio, n=size) * torch.fft.rfft(room, n=size)
            wet = torch.fft.irfft(spectrum, n=size)[:, : audio.shape[1]] * mask
        wanted, given = audio.square().sum(1), wet.square().sum(1)
        wet = wet * (wanted / given.clamp(min=1.0)).sqrt().unsqueeze(1)
        changed = (draws[1] < self.prob) & (given > 0)
        return torch.where(changed.unsqueeze(1), wet, audio), lengths


@lru_cache(maxsize=8)
def read_clips(
    files: tuple[Path, ...], sample_rate: int, longest: float, device: torch.device
) -> Clips:
    """Read the first ``longest`` seconds of every file onto a device, as int16, once."""
    limit = max(1, round(longest * sample_rate))
    clips = [torch.from_numpy(read_audio(file, sample_rate)[:limit].copy()) for file in files]
    lengths = torch.tensor([len(clip) for clip in clips])
    starts = lengths.cumsum(0) - lengths
    return Clips(torch.cat(clips).to(device), starts.to(device), lengths.to(device))


@lru_cache(maxsize=8)
def read_rooms(files: tuple[Path, ...], sample_rate: int, device: torch.device) -> Tensor:
    """Read impulse responses from their loudest sample on, padded to the longest: (N, R)."""
    rooms = []
    for file in files:
        room = torch.from_numpy(read_audio(file, sample_rate)).float()
        room = room[int(room.abs().argmax()) :][: LONGEST_IMPULSE * sample_rate]
        rooms.append(room / room.abs().max().clamp(min=1.0))
    longest = max(map(len, rooms))
    return torch.stack([pad(room, (0, longest - len(room))) for room in rooms]).to(device)

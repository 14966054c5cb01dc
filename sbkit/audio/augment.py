"""Augmentation on the device of the audio: speed, noise and reverberation, SpecAugment.

Legend: B utterances, S samples, T frames, M mel bins, N clips of a folder, samples of a noise or
masks, K kinds of noise, R samples of an impulse response.

Random numbers belong to an utterance (`audio/random_draws.py`), so they do not depend on its batch.
The speeds were drawn when the epoch was planned. Files of noise and impulse responses are read
once, for the first batch, and stay on the device; after that the host never waits. In a YAML:

    add_noise: !new:sbkit.audio.augment.AddNoise
        folder: /data/musan/noise
        snr_db: [5, 20]
        prob: 0.5
        sample_rate: !ref <sample_rate>
    add_reverb: !new:sbkit.audio.augment.AddReverb
        folder: /data/rirs
        prob: 0.3
        sample_rate: !ref <sample_rate>
    wave_augment: !new:sbkit.audio.augment.Compose
        parts: [!ref <add_reverb>, !ref <add_noise>]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import MIN_HZ
from sbkit.audio.io import find_audio_files, read_audio
from sbkit.audio.lengths import bucket_of, length_mask
from sbkit.audio.random_draws import draw_uniform
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.ranges import HOUR, Count, Decibels, Range, Share, require_in_range
from sbkit.base.units import SAMPLE_RATE, seconds_to_samples

MAX_NOISE_SECONDS = 3600  # per folder, 115 MB on the device; each of its files gives an equal part
MIN_NOISE_SECONDS_PER_FILE = 2  # a shorter noise repeats audibly
MAX_FILES = MAX_NOISE_SECONDS // MIN_NOISE_SECONDS_PER_FILE
SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)  # of colored noise: white to brown
NOISE_SAMPLES = 1 << 20
CUTOFF_SHARE = 0.99  # of the lower Nyquist frequency: a change of speed keeps sound up to there
ZERO_CROSSINGS = 6  # of the sinc on each side of a sample
MAX_IMPULSE_SECONDS = 2  # of a room's impulse response, from the direct sound on

AugmentFeatures = Callable[[Tensor, Tensor], Tensor]  # (B, T, M), (B,) -> (B, T, M)


@dataclass(frozen=True, slots=True)
class SpeedGroup:
    """Consecutive utterances of a batch that are played at one speed."""

    speed_percent: int  # 100 is the natural speed
    num_utterances: int
    max_samples: int  # the length of the longest utterance at its natural speed


class AudioBatch(Protocol):
    """Audio (B, S), its lengths (B,), and the speeds of its utterances in order."""

    @property
    def audio(self) -> Tensor: ...
    @property
    def audio_lengths(self) -> Tensor: ...
    @property
    def speed_groups(self) -> Sequence[SpeedGroup]: ...


class Augmentation:
    """Change the speed of utterances and, in training, apply the YAML's augmentations.

    `wave_augment` changes audio, and `spec_augment` features.

    features: the part that computes features; None for a model that takes audio.
    """

    def __init__(self, hparams: object, *, features: object | None = None) -> None:
        self._wave = _read_augmentation(hparams, "wave_augment")  # (B, S), (B,) -> same
        self._spec: AugmentFeatures | None = _read_augmentation(hparams, "spec_augment")
        if self._spec is not None and features is None:
            raise ConfigError(
                "`spec_augment` masks features, but the `encoder` of this model takes audio.",
                keys=("spec_augment",),
            )

    def augment_audio(self, batch: AudioBatch, *, training: bool) -> tuple[Tensor, Tensor]:
        """Return the audio of a batch as float, at its speeds, and in training augmented.

        -> (B, S), (B,).
        """
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        audio = audio.float()
        if training and self._wave is not None:
            audio, lengths = self._wave(audio, lengths)
        return audio, lengths

    def feature_augmentation(self, *, training: bool) -> AugmentFeatures | None:
        return self._spec if training else None


def _read_augmentation(hparams: object, key: str) -> Any:
    part = getattr(hparams, key, None)
    if part is None:
        return None
    if not callable(part):
        raise ConfigError(
            f"`{key}` must be an augmentation such as !new:sbkit.audio.augment.SpecAugment, but is "
            f"{part!r}.",
            keys=(key,),
        )
    forward = getattr(part, "forward", part)
    if (getattr(forward, "__module__", None) or "").startswith("speechbrain."):
        raise ConfigError(
            f"`{key}` is called with lengths in samples or frames, but modules of SpeechBrain take "
            "fractions. Wrap it in a module whose forward(x, lengths) converts them.",
            keys=(key,),
        )
    return part


def speed_perturb(
    audio: Tensor, lengths: Tensor, speed_groups: Sequence[SpeedGroup]
) -> tuple[Tensor, Tensor]:
    """Play utterances faster or slower: (B, S), (B,) -> (B, S'), (B,).

    Resampling changes tempo and pitch together (Ko et al. 2015). The host knows all new lengths, so
    it never waits for the device.

    speed_groups: covers all utterances, in order.

    >>> audio, lengths = torch.zeros(1, 8000), torch.tensor([8000])
    >>> speed_perturb(audio, lengths, [SpeedGroup(80, num_utterances=1, max_samples=8000)])[1]
    tensor([10000])
    """
    if all(group.speed_percent == 100 for group in speed_groups):
        return audio, lengths
    sizes = [group.num_utterances for group in speed_groups]
    new_clips: list[Tensor] = []
    new_lengths: list[Tensor] = []
    for group, clips, clip_lengths in zip(
        speed_groups, torch.split(audio, sizes), torch.split(lengths, sizes), strict=True
    ):
        percent = group.speed_percent
        clips = clips[:, : group.max_samples].float()
        if percent != 100:
            clips = change_speed(clips, percent)
            clip_lengths = torch.div(clip_lengths * 100, percent, rounding_mode="floor")
            mask = length_mask(clip_lengths, clips.shape[1], clips.device)
            clips = clips * mask  # the filter rings past the end
        new_clips.append(clips)
        new_lengths.append(clip_lengths)
    max_samples = max(clips.shape[1] for clips in new_clips)
    padded = [pad(clips, (0, max_samples - clips.shape[1])) for clips in new_clips]
    return torch.cat(padded), torch.cat(new_lengths)


def change_speed(clips: Tensor, percent: int) -> Tensor:
    """Play clips, (B, S), at a speed: -> (B, ceil(100 S / percent)).

    The kernel is polyphase: 110 % turns 11 samples into 10, each by a filter of its own.
    """
    divisor = math.gcd(percent, 100)
    period, num_filters = percent // divisor, 100 // divisor
    kernel = resampling_kernel(period, num_filters, clips.device)
    margin = (kernel.shape[2] - period) // 2
    padded = pad(clips, (margin, margin + period)).unsqueeze(1)
    resampled = conv1d(padded, kernel, stride=period).transpose(1, 2).flatten(1)
    return resampled[:, : -(-num_filters * clips.shape[1] // period)]


@lru_cache  # the host must wait while a kernel is made
def resampling_kernel(period: int, num_filters: int, device: torch.device) -> Tensor:
    """Return a sinc under a Hann window for each new sample of a period: (num_filters, 1, taps).

    Source: `torchaudio.transforms.Resample`, whose kernel is the same to the bit.
    """
    cutoff = min(period, num_filters) * CUTOFF_SHARE
    margin = math.ceil(ZERO_CROSSINGS * period / cutoff)
    times = torch.arange(-margin, margin + period, dtype=torch.float32) / period
    delays = torch.arange(0, -num_filters, -1, dtype=torch.float32) / num_filters
    times = (delays[:, None, None] + times) * cutoff
    times = times.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = torch.cos(times * math.pi / ZERO_CROSSINGS / 2).square() * (cutoff / period)
    angles = math.pi * times
    sinc = torch.where(angles == 0, 1.0, angles.sin() / angles)
    return (sinc * window).to(device, non_blocking=True)


class Compose(nn.Module):
    """Apply augmentations of audio in order: (B, S), (B,) -> (B, S), (B,).

    Each part takes and returns audio and lengths, and keeps the padding zero.
    """

    def __init__(self, *, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            audio, lengths = part(audio, lengths)
        return audio, lengths


class NoiseClips(NamedTuple):
    """Concatenated clips: samples (sum of lengths,) of int16, starts (N,), lengths (N,)."""

    samples: Tensor
    starts: Tensor
    lengths: Tensor


class _FolderAugmentation(nn.Module):
    """Apply a random file of a folder to each utterance, with probability ``prob``."""

    def __init__(self, *, folder: str, prob: Share = 0.3, sample_rate: int = SAMPLE_RATE) -> None:
        super().__init__()
        files = find_audio_files(Path(folder))
        if not files:
            raise DataError(
                f"`folder` of {type(self).__name__} must hold audio files, but {folder} holds none."
            )
        # Of too many files, take some that are evenly spaced in the sorted list.
        count = min(len(files), MAX_FILES)
        selected_files = [files[index * len(files) // count] for index in range(count)]
        # The times are part of the cache key of `read_clips`, because files may be replaced.
        self.files = tuple((file, file.stat().st_mtime_ns) for file in selected_files)
        self.prob = prob
        self.sample_rate = sample_rate


class AddNoise(_FolderAugmentation):
    """Add noise at a random signal-to-noise ratio: (B, S), (B,) -> (B, S), (B,).

    The ratio compares powers over the utterance's own length. An utterance stays unchanged with a
    probability of 1 - ``prob``, and if it or the noise is silent. The noise starts at a random
    sample of its file and repeats as needed. The result is float in the scale of int16, and is not
    clipped.

    folder: recordings of noise in any format, searched to any depth.
    snr_db: the lowest and the highest ratio, in dB.
    """

    def __init__(
        self,
        *,
        folder: str,
        snr_db: Decibels = (5, 20),
        prob: Share = 0.5,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        super().__init__(folder=folder, prob=prob, sample_rate=sample_rate)
        require_in_range("snr_db", snr_db, Decibels)
        self.min_snr_db, self.max_snr_db = map(float, snr_db)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        draws = draw_uniform(len(lengths), 4).to(audio.device, non_blocking=True).T
        seconds = MAX_NOISE_SECONDS / len(self.files)
        clips = read_clips(self.files, self.sample_rate, seconds, audio.device)
        clip_index = (draws[0] * len(clips.lengths)).long()  # (B,)
        clip_length = clips.lengths[clip_index].unsqueeze(1)
        start = (draws[1].unsqueeze(1) * clip_length).long()
        offsets = (start + torch.arange(audio.shape[1], device=audio.device)) % clip_length
        noise = clips.samples[clips.starts[clip_index].unsqueeze(1) + offsets].float()  # (B, S)
        mask = length_mask(lengths, audio.shape[1], audio.device)
        audio = audio.float()
        noise = noise * mask
        snr_db = self.min_snr_db + draws[2] * (self.max_snr_db - self.min_snr_db)
        target_noise_energy = (audio * mask).square().sum(1) / 10 ** (snr_db / 10)  # (B,)
        noise_energy = noise.square().sum(1)
        is_noisy = (draws[3] < self.prob) & (noise_energy > 0)
        gain = (target_noise_energy / noise_energy.clamp(min=1.0)).sqrt() * is_noisy
        return audio + gain.unsqueeze(1) * noise, lengths


class SoftenPart(nn.Module):
    """Make the beginning or the end of utterances softer: (B, S), (B,) -> (B, S), (B,).

    A model whose features are relative to the level of the utterance does not hear the softer one
    of two speakers, unless it has learned to: 20 dB below, a CER of 51 % became 17 %.

    prob: the share of utterances with a softer part, from 20 to 80 % of their length.
    max_db: the largest difference; the smallest is 0.
    """

    def __init__(
        self,
        *,
        prob: Share = 0.3,
        max_db: Annotated[float, Range(low=0, high=60, advice="20 is usual.")] = 20.0,
    ) -> None:
        super().__init__()
        self.prob = prob
        self.max_db = max_db

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        draws = draw_uniform(len(lengths), 4).to(audio.device, non_blocking=True).T
        border, decibels = 0.2 + 0.6 * draws[0], self.max_db * draws[1]
        is_chosen, is_beginning = draws[2] < self.prob, draws[3] < 0.5
        gain = torch.where(is_chosen, 10 ** (-decibels / 20), 1.0)
        end = (border * lengths.to(audio.device, non_blocking=True)).unsqueeze(1)
        is_before = torch.arange(audio.shape[1], device=audio.device) < end  # (B, S)
        is_softer = is_before == is_beginning.unsqueeze(1)
        return audio.float() * torch.where(is_softer, gain.unsqueeze(1), 1.0), lengths


class AddPauses(nn.Module):
    """Put pauses with noise around utterances: (B, S), (B,) -> (B, S'), (B,).

    A model whose features have no level mistakes pure noise for speech, unless it has learned what
    noise is. The noise is white to brown, and 60 to 10 dB below the utterance.

    prob: the chance of pauses. A random part of them comes before the utterance.
    max_seconds: the longest total duration of both pauses.
    """

    def __init__(
        self,
        *,
        prob: Share = 0.3,
        max_seconds: Annotated[float, Range(low=0, high=HOUR, advice="Pass 0 for none.")] = 2.0,
        sample_rate: int = SAMPLE_RATE,
    ) -> None:
        super().__init__()
        self.prob = prob
        self.max_seconds = max_seconds
        self.sample_rate = sample_rate

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        draws = draw_uniform(len(lengths), 6)
        max_samples = seconds_to_samples(self.max_seconds, self.sample_rate)
        pauses = (draws[:, 0] * max_samples * (draws[:, 1] < self.prob)).long()
        new_lengths = lengths + pauses
        device, size = audio.device, int(new_lengths.max())
        start = (draws[:, 2] * pauses).long().to(device, non_blocking=True).unsqueeze(1)
        level, kind, offset = draws[:, 3:].to(device, non_blocking=True).T
        samples = torch.arange(size, device=device)
        end = start + lengths.to(device, non_blocking=True).unsqueeze(1)
        is_speech = (samples >= start) & (samples < end)  # (B, S')
        audio = audio.float()
        speech = audio.gather(1, (samples - start).clamp(0, audio.shape[1] - 1))
        colored = make_colored(self.sample_rate, device)  # (K, N)
        offsets = (offset * colored.shape[1]).long().unsqueeze(1) + samples
        noise = colored[(kind * len(colored)).long().unsqueeze(1), offsets % colored.shape[1]]
        power = audio.square().sum(1) / lengths.clamp(min=1).to(device, non_blocking=True)
        gain = (power * 10 ** (-(10 + 50 * level) / 10)).sqrt().unsqueeze(1)
        is_pause = ~is_speech & length_mask(new_lengths, size, device)
        return speech * is_speech + gain * noise * is_pause, new_lengths


@lru_cache(maxsize=8)
def make_colored(sample_rate: int, device: torch.device) -> Tensor:
    """Make noise of each slope: (K, N), always the same."""
    white = torch.randn(NOISE_SAMPLES, generator=torch.Generator().manual_seed(0))
    noises = torch.stack([color(white, slope, sample_rate) for slope in SLOPES])
    return noises.to(device, non_blocking=True)


def color(white: Tensor, slope: float, sample_rate: int) -> Tensor:
    """Color noise (S,): its power falls by frequency ** ``slope``, and is 1 in total.

    Frequencies below the band of the features are removed.
    """
    spectrum = torch.fft.rfft(white)
    hertz = torch.fft.rfftfreq(len(white), 1 / sample_rate)
    weights = hertz.clamp(min=MIN_HZ) ** (-slope / 2) * (hertz >= MIN_HZ)
    noise: Tensor = torch.fft.irfft(spectrum * weights, n=len(white))
    return noise / noise.square().mean().sqrt()


class AddReverb(_FolderAugmentation):
    """Convolve with the impulse response of a random room: (B, S), (B,) -> (B, S), (B,).

    The direct sound keeps its position and the utterance its power. The reverberation past the end
    of an utterance is cut off. Source: Ko et al. 2017.

    folder: recorded impulse responses in any format, searched to any depth.
    prob: the share of utterances that are convolved.
    """

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        draws = draw_uniform(len(lengths), 2).to(audio.device, non_blocking=True).T
        responses = read_impulse_responses(self.files, self.sample_rate, audio.device)  # (N, R)
        response = responses[(draws[0] * len(responses)).long()]
        mask = length_mask(lengths, audio.shape[1], audio.device)
        audio = audio.float()
        with torch.autocast(audio.device.type, enabled=False):
            # CUDA keeps a plan for each size, in memory that torch does not count. Rounding up
            # leaves only a few sizes.
            size = bucket_of(audio.shape[1] + response.shape[1] - 1)
            spectrum = torch.fft.rfft(audio, n=size) * torch.fft.rfft(response, n=size)
            wet = torch.fft.irfft(spectrum, n=size)[:, : audio.shape[1]] * mask
        target_energy = audio.square().sum(1)
        wet_energy = wet.square().sum(1)
        wet = wet * (target_energy / wet_energy.clamp(min=1.0)).sqrt().unsqueeze(1)
        is_wet = (draws[1] < self.prob) & (wet_energy > 0)
        return torch.where(is_wet.unsqueeze(1), wet, audio), lengths


@lru_cache(maxsize=8)
def read_clips(
    files: tuple[tuple[Path, int], ...], sample_rate: int, max_seconds: float, device: torch.device
) -> NoiseClips:
    """Read the start of every file, up to ``max_seconds``, onto a device, as int16."""
    limit = max(1, seconds_to_samples(max_seconds, sample_rate))
    clips = [torch.from_numpy(read_audio(file, sample_rate)[:limit].copy()) for file, _ in files]
    lengths = torch.tensor([len(clip) for clip in clips])
    starts = lengths.cumsum(0) - lengths
    return NoiseClips(torch.cat(clips).to(device), starts.to(device), lengths.to(device))


@lru_cache(maxsize=8)
def read_impulse_responses(
    files: tuple[tuple[Path, int], ...], sample_rate: int, device: torch.device
) -> Tensor:
    """Read impulse responses from their loudest sample on, padded to the longest: (N, R)."""
    responses = []
    for file, _ in files:
        response = torch.from_numpy(read_audio(file, sample_rate)).float()
        loudest = int(response.abs().argmax())  # the direct sound
        response = response[loudest : loudest + MAX_IMPULSE_SECONDS * sample_rate]
        responses.append(response / response.abs().max().clamp(min=1.0))
    return pad_sequence(responses, batch_first=True).to(device)


class SpecAugment(nn.Module):
    """Mask random spans of frames and of mel bins: (B, T, M), (B,) -> (B, T, M).

    Masked values become the mean of their bin over the utterance. The masks of an utterance are the
    same in any batch. Source: Park et al. 2019.

    time_masks, freq_masks: masks per utterance.
    time_width: the most frames of a time mask, which covers at most ``max_time_fraction`` of the
        utterance.
    freq_width: the most mel bins of a frequency mask, which covers at most all of them.

    >>> features, lengths = torch.rand(1, 100, 80), torch.tensor([100])
    >>> SpecAugment(freq_masks=0, time_masks=1)(features, lengths).shape
    torch.Size([1, 100, 80])
    """

    def __init__(
        self,
        *,
        time_masks: Count = 2,
        time_width: Count = 40,
        max_time_fraction: Share = 0.2,
        freq_masks: Count = 2,
        freq_width: Count = 27,
    ) -> None:
        super().__init__()
        self.time_masks = time_masks
        self.time_width = time_width
        self.max_time_fraction = max_time_fraction
        self.freq_masks = freq_masks
        self.freq_width = freq_width

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        _, frames, bins = features.shape
        device = features.device
        num_masks = self.time_masks + self.freq_masks
        draws = draw_uniform(len(lengths), 2, num_masks).to(lengths.device)
        time_draws, freq_draws = torch.split(draws, [self.time_masks, self.freq_masks], dim=2)
        max_frames = (lengths * self.max_time_fraction).floor().clamp(max=self.time_width)
        time_mask = _random_spans(time_draws, max_frames, lengths, frames, device)
        max_bins = torch.full_like(lengths, min(self.freq_width, bins))
        num_bins = torch.full_like(lengths, bins)
        freq_mask = _random_spans(freq_draws, max_bins, num_bins, bins, device)
        is_masked = time_mask.unsqueeze(2) | freq_mask.unsqueeze(1)
        mask = length_mask(lengths, frames, device).unsqueeze(2)  # true within utterances
        counts = lengths.clamp(min=1).to(device, non_blocking=True).view(-1, 1, 1)
        mean = (features * mask).sum(1, keepdim=True) / counts
        return torch.where(is_masked & mask, mean, features)


def _random_spans(
    draws: Tensor, max_width: Tensor, lengths: Tensor, size: int, device: torch.device
) -> Tensor:
    """Mark N spans in each row by draws below 1: (B, 2, N), (B,), (B,) -> (B, size) of bool.

    Every width from 0 to ``max_width`` is equally likely, and so is every position of that width.
    """
    width = (draws[:, 0] * (max_width + 1).unsqueeze(1)).floor()  # (B, N)
    start = (draws[:, 1] * (lengths.unsqueeze(1) - width + 1)).floor()
    edges = torch.stack([start, start + width]).to(device, non_blocking=True).unsqueeze(3)
    positions = torch.arange(size, device=device)
    return ((positions >= edges[0]) & (positions < edges[1])).any(1)

"""Log-mel filterbanks as Kaldi defines them, for batches, on the device of the audio.

Legend: B utterances or sessions, S samples, T features of 10 ms, M mel bins.

They agree with `torchaudio.compliance.kaldi.fbank` (25 ms Povey windows every 10 ms, mean removed,
pre-emphasis 0.97, no dither, power spectrum, only whole windows), which deployed runtimes such as
sherpa-onnx compute. Audio is in the scale of int16 (-32768 to 32767), as in Kaldi.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, length_mask, sum_dtype
from sbkit.base.errors import ConfigError
from sbkit.base.messages import plural
from sbkit.base.ranges import Range, require_in_range
from sbkit.base.units import SAMPLE_RATE, shift_samples, window_samples

# 0.97 as float32 has it, like Kaldi: in a graph of float64, torch's exporter rounds the number to
# float32, and quiet bins beside loud ones would differ by up to 1e-4.
PREEMPHASIS = torch.tensor(0.97).item()
MIN_HZ = 20.0  # the lower edge of the first filter; the last one ends at half the sample rate
MIN_SAMPLE_RATE = 1000  # Hz; below, no mel filter is left above MIN_HZ
Hertz = Annotated[
    int, Range(low=MIN_SAMPLE_RATE, integer=True, advice="Write hertz, such as 16000.")
]
NMels = Annotated[int, Range(low=3, high=1024, integer=True, advice="80 is usual.")]
EPSILON = torch.finfo(torch.float32).eps  # the floor under the logarithm
# Windows that a trained model transforms at a time on the CPU. All of 30 s at once take 62 MB
# instead of 20 and, in one thread, 1.2 times as long. Training would gain nothing from parts.
MAX_WINDOWS = 256

Level = Annotated[  # the level that is removed
    Literal["utterance", "running", "none"], "utterance is usual; running is for streaming."
]
# In log power. White noise of -72 dBFS (RMS) has 15.5, so quieter noise is not raised to the level
# of speech. The test clips of the default corpus have 22.0 to 25.3, and at -30 dB 15.1 to 18.4.
MIN_LEVEL = 15.5
# In log energy, 54 dB. Anything further below the level becomes 0, like the padding: down there,
# steps of int16 would be audible in quiet clips, but not in loud ones.
RANGE = 12.5
# A sound raises the level if it lasts for half of 0.6 s, so clicks, bumps and beeps do not. Every
# fifth frame is compared: all of them would give the same level in four times the time.
SPAN_FRAMES, SPAN_STEP = 60, 5
SPAN_HOP = 4  # between the spans of a whole clip, which together have all of its frames
MIN_SUSTAINED = SPAN_FRAMES // SPAN_STEP // 2
PAST_FRAMES = SPAN_FRAMES - SPAN_STEP  # before a frame
# 25 dB. In tones, chords and hum, the lowest or the highest 7/16 of the bins are further below all
# bins than in speech. A tone between two halves would have power in both: at 1.8 kHz, it would
# raise the level of speech that is 20 dB softer by 40 dB.
MAX_TILT = 10**2.5
OUTER_BINS = 7  # sixteenths
MEMORY_FRAMES = 100  # after 1 s, the weight of a frame in a running level has fallen to 1 / e
LEVEL_BLOCK_FRAMES = 10 * MEMORY_FRAMES  # the weights within a block differ by up to exp(10)
MIN_WEIGHT_SUM = 1e-9  # of all frames; digital silence has less
LEVEL_STATE = 2 + PAST_FRAMES  # values of a running level: two sums, and the last powers


class Fbank(nn.Module):
    """Compute log-mel filterbanks: audio (B, S), lengths (B,) -> (B, T, M), lengths (B,).

    The module has no tensors: none can be on the wrong device or missing from a checkpoint.

    audio: float, in the scale of int16.
    measured: the samples (B,) from which the level of an utterance is measured, by default all.
    level: `utterance` or `running` removes the level of each utterance, or of its frames so far
        (`subtract_level`); `none` keeps it, as Kaldi does.

    >>> features, lengths = Fbank()(torch.zeros(1, 16_000), torch.tensor([16_000]))
    >>> features.shape, lengths
    (torch.Size([1, 98, 80]), tensor([98]))
    """

    normalizes_clips = True

    def __init__(
        self, *, n_mels: NMels = 80, sample_rate: Hertz = SAMPLE_RATE, level: Level = "none"
    ) -> None:
        require_in_range("level", level, Level)
        make_filters = partial(mel_filters, sample_rate=sample_rate, device=torch.device("cpu"))
        require_no_empty_bin(make_filters, n_mels, f"{sample_rate} Hz")
        super().__init__()
        self.n_mels = n_mels
        self.sample_rate = sample_rate
        self.level = level
        window, shift = window_samples(sample_rate), shift_samples(sample_rate)
        self.subsampling = Subsampling.of_windows(window, shift)

    def forward(
        self, audio: Tensor, lengths: Tensor, measured: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if measured is not None:  # a clip shorter than a window is padded to one frame
            measured = self.subsampling.count(measured).clip(min=1)
        return self.remove_level(*self.log_mels(audio, lengths), measured)

    def start(self) -> dict[str, Tensor]:
        """Return the state of the running level before the first chunk."""
        return {"level": torch.zeros(1, LEVEL_STATE)}

    def forward_chunk(
        self, audio: Tensor, lengths: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute the features of a chunk: (B, S), (B,), state -> (B, T, M), (B,), state."""
        features, frames = self.log_mels(audio, lengths)
        features, level = subtract_level(
            features, frames, frames, level=self.level, state=state["level"]
        )
        return features, frames, {"level": level}

    def remove_level(
        self, features: Tensor, frames: Tensor, measured: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Remove the level of whole clips as declared: (B, T, M), (B,) -> same."""
        measured = frames if measured is None or self.level == "running" else measured
        state = features.new_zeros(features.shape[0], LEVEL_STATE)
        return subtract_level(features, frames, measured, level=self.level, state=state)[0], frames

    def log_mels(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute in float32 whatever the autocast state; frames in the padding are zero.

        A trained model on the CPU computes its spectra in float64, at the same speed. In float32
        the quietest bins are wrong by up to 0.005, differently in each runtime.
        """
        is_exact = not self.training and audio.device.type == "cpu"
        with torch.autocast(audio.device.type, enabled=False):
            audio = audio.to(torch.float64 if is_exact else torch.float32)
            missing = window_samples(self.sample_rate) - audio.shape[-1]
            if missing > 0:  # so that a frame exists
                audio = nn.functional.pad(audio, (0, missing))
            features = self._energies(audio).clamp(min=EPSILON).log()
        frames = self.subsampling.count(lengths)
        mask = length_mask(frames, features.shape[1], features.device)
        return features * mask.unsqueeze(-1), frames

    def _energies(self, audio: Tensor) -> Tensor:
        """Compute the energies of mel bins: (B, S) -> (B, T, M)."""
        rate = self.sample_rate
        windows = audio.unfold(-1, window_samples(rate), shift_samples(rate))  # -> (B, T, 400)
        if audio.dtype == torch.float32 or torch.compiler.is_exporting():
            squares = self._squares(windows)
        else:
            parts = torch.split(windows, max(1, MAX_WINDOWS // len(windows)), dim=1)
            squares = torch.cat([self._squares(part) for part in parts], dim=1)
        return torch.matmul(squares, mel_filters(self.n_mels, rate, audio.device))  # (B, T, M)

    def _squares(self, windows: Tensor) -> Tensor:
        """Return the squared real and imaginary parts of the spectrum: (B, T, 400) -> 514.

        The filters add them up: abs() would take a square root.
        """
        rate = self.sample_rate
        windows = windows - windows.mean(-1, keepdim=True)
        first, current, previous = windows[..., :1], windows[..., 1:], windows[..., :-1]
        missing = fft_samples(rate) - windows.shape[2]
        zeros = windows.new_zeros(()).expand(*windows.shape[:2], missing)
        parts = [first - PREEMPHASIS * first, current - PREEMPHASIS * previous, zeros]
        windows = torch.cat(parts, dim=-1).mul_(povey_window(rate, windows.device))  # (B, T, 512)
        return torch.view_as_real(torch.fft.rfft(windows)).square().flatten(-2).float()


def subtract_level(
    features: Tensor, lengths: Tensor, measured: Tensor, *, level: str, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Subtract the level: (B, T, M), (B,) -> nonnegative log energies (B, T, M), 0 in the padding.

    The level is the mean of the sustained log power, weighted by the square of the power. Clicks
    and beeps are not sustained, and pauses have no weight.

    state: (B, LEVEL_STATE) of a running level; zeros before the first frame. The state after the
        last frame is returned.
    measured: the number of frames (B,) from which the level is measured.
    """
    if level == "none":
        return features, state
    mask = length_mask(lengths, features.shape[1], features.device)
    power = _measure_power(features).to(sum_dtype(features.device))  # (B, T)
    is_measured = length_mask(measured, features.shape[1], features.device)
    if level == "running":
        past = torch.cat([state[:, 2:].to(power.dtype), power], 1)
        spans = past.unfold(1, PAST_FRAMES + 1, 1)[..., ::SPAN_STEP]  # (B, T, 12)
        terms, sums = _accumulate(_weigh_sustained(spans, is_measured), state[:, :2])
        state = torch.cat([sums, past[:, -PAST_FRAMES:].to(sums.dtype)], 1)
    else:
        spans = _spans_of(power, measured)
        terms = _weigh_sustained(spans, is_measured[:, ::SPAN_HOP]).sum(-1, keepdim=True)
    height = (terms[:, :1] / terms[:, 1:].clamp(min=MIN_WEIGHT_SUM)).clamp(min=0)  # (B, 1, T or 1)
    zero = (height.transpose(1, 2) + (MIN_LEVEL - RANGE)).to(features.dtype)
    return (features - zero).relu() * mask.unsqueeze(-1), state


def _measure_power(features: Tensor) -> Tensor:
    """Return the log power of frames above MIN_LEVEL, less that of tones: (B, T, M) -> (B, T)."""
    bins = features.shape[2]
    size = OUTER_BINS * bins // 16
    parts = torch.split(features.exp(), [size, bins - 2 * size, size], -1)
    low, middle, high = (part.sum(-1) for part in parts)
    return torch.minimum(low + middle + high, MAX_TILT * torch.minimum(low, high)).log() - MIN_LEVEL


def _spans_of(power: Tensor, measured: Tensor) -> Tensor:
    """Return every fourth frame, and those before it: (B, T) -> (B, T / 4, 12).

    The first frames have those after them, and a clip shorter than a span goes on at its other end.
    """
    frames = torch.arange(0, power.shape[1], SPAN_HOP, device=power.device).clip(min=PAST_FRAMES)
    index = frames.unsqueeze(1) - torch.arange(0, SPAN_FRAMES, SPAN_STEP, device=power.device)
    index = index.unsqueeze(0) % measured.clip(min=1).to(power.device)[:, None, None]
    return power.gather(1, index.flatten(1)).reshape(index.shape)


def _weigh_sustained(spans: Tensor, is_measured: Tensor) -> Tensor:
    """Return sustained power times weight, and the weight: (B, T, 12), (B, T) -> (B, 2, T).

    Half of the frames of a span have at least its sustained power.
    """
    sustained = spans.sort(-1).values[..., -MIN_SUSTAINED]  # (B, T)
    weights = (2 * sustained).exp() * is_measured
    return torch.stack([weights * sustained, weights], 1)


def _accumulate(terms: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Add the terms up to each frame, (B, 2, T), and return the sums after the last, (B, 2).

    In a block, later frames weigh more, instead of earlier ones less: only the ratio of the sums
    counts. Over all frames, the weights would overflow after 11 minutes. Legend: N blocks.
    """
    frames = terms.shape[2]
    size, padding = LEVEL_BLOCK_FRAMES, 2 * LEVEL_BLOCK_FRAMES - frames % LEVEL_BLOCK_FRAMES
    if isinstance(frames, int):  # not a tracer's symbol, which would make one block a special case
        size = min(frames, LEVEL_BLOCK_FRAMES)
        padding = -frames % size
    blocks = nn.functional.pad(terms, (0, padding)).reshape(*terms.shape[:2], -1, size)
    ages = torch.arange(1, size + 1, device=terms.device).to(terms.dtype) / MEMORY_FRAMES
    growth = ages.exp()
    totals = (blocks * growth).cumsum(-1)  # of each block: (B, 2, N, size)
    block_sums = torch.cat([sums.to(terms.dtype).unsqueeze(-1), totals[..., -1] / growth[-1]], -1)
    block = torch.arange(block_sums.shape[2], device=terms.device)
    decay = (-ages[-1] * (block.unsqueeze(1) - block).tril()).exp().tril()
    before = (block_sums.unsqueeze(-2) * decay).sum(-1)[..., :-1]  # the sums at each block's start
    totals = (totals + before.unsqueeze(-1)).flatten(-2)[..., :frames]
    return totals, (totals[..., -1] / growth[(frames - 1) % size]).to(sums.dtype)


def fft_samples(sample_rate: int) -> int:
    """Round the window up to a power of two: 512 at 16 kHz."""
    return 1 << (window_samples(sample_rate) - 1).bit_length()


@lru_cache(maxsize=8)
def povey_window(sample_rate: int, device: torch.device) -> Tensor:
    """Return Kaldi's default window, a Hann window to the power 0.85, then zeros: (512,)."""
    size = window_samples(sample_rate)
    window = torch.hann_window(size, periodic=False).pow(0.85)
    window = nn.functional.pad(window, (0, fft_samples(sample_rate) - size))
    return window.to(device, non_blocking=True)


@lru_cache(maxsize=8)
def mel_filters(n_mels: int, sample_rate: int, device: torch.device) -> Tensor:
    """Return triangles of equal width on Kaldi's mel scale, as a matrix: (514, M) at 16 kHz.

    A bin has two equal rows, for the squares of its real and imaginary part. In float64, filters
    and window differ by one part in 10^7, which changed quiet bins of speech by 0.0026.
    """
    size = fft_samples(sample_rate)
    lowest, highest = (1127.0 * math.log(1.0 + hz / 700.0) for hz in (MIN_HZ, sample_rate / 2))
    corners = lowest + torch.arange(n_mels + 2.0) * ((highest - lowest) / (n_mels + 1))
    mels = 1127.0 * (1.0 + sample_rate / size * torch.arange(size // 2) / 700.0).log()
    filters = nn.functional.pad(triangles(mels, corners), (0, 0, 0, 1))  # none at half the rate
    return filters.repeat_interleave(2, dim=0).to(device, non_blocking=True)


def require_no_empty_bin(
    make_filters: Callable[[int], Tensor], n_mels: int, transform: str
) -> None:
    """Raise ConfigError if a mel bin lies between two frequencies of the transform."""

    def count_empty(bins: int) -> int:
        return int((~make_filters(bins).any(0)).sum())

    if num_empty := count_empty(n_mels):
        most = next(bins for bins in range(n_mels - 1, -1, -1) if not count_empty(bins))
        raise ConfigError(
            f"`n_mels` must be at most {most} for {transform}, but is {n_mels}: "
            f"{plural(num_empty, 'bin')} would have no frequency of the window.",
            keys=("n_mels",),
        )


def triangles(positions: Tensor, corners: Tensor) -> Tensor:
    """Return a triangle over each three consecutive corners, (M + 2,), at positions: -> (F, M)."""
    widths = corners.diff()
    distances = positions.unsqueeze(1) - corners  # (F, M + 2)
    rising, falling = distances[:, :-2] / widths[:-1], -distances[:, 2:] / widths[1:]
    return torch.minimum(rising, falling).clamp(min=0.0)

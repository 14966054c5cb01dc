"""Channels of a file: one of them, or their mix, and whether the mix loses something.

Legend: S samples, C channels, W windows of 50 ms.
"""

import numpy as np
import numpy.typing as npt

from sbkit.audio.containers import AudioError

Floats = npt.NDArray[np.float32]

# Speech is in the center, which keeps its level; the bass has none. FFmpeg has the same weights.
CENTER, BASS = "FC", "LFE"
WEIGHTS = {CENTER: 1.0, "FL": 0.5**0.5, "FR": 0.5**0.5, BASS: 0.0}
SURROUND_WEIGHT = 0.5
WINDOWS_PER_SECOND = 20
MIN_POWER_RATIO = 10.0  # of two channels of which only one is heard
MIN_SHARE = 0.1  # of the windows in which only one channel is heard, for each of the two
CANCELED_SHARE = 0.05  # of the channels' power; independent channels leave half of it
SILENCE_POWER = 1e-7  # -70 dB of full scale
# How two channels lose speech when they are mixed.
DIFFER = "have different sound"
CANCEL = "cancel each other out"


class ChannelMixer:
    """Make one channel of those of a file, and compare the first two.

    channel: the one to take, counted from 0; None: mix all.
    """

    def __init__(self, channel: int | None = None) -> None:
        self.channel = channel
        self.peak = 0.0  # of a file of floats, by which it is divided if it exceeds 1
        self._powers = np.zeros(2)  # of a channel and of the mix, summed over windows
        self._one_sided = np.zeros(2, np.int64)  # windows in which only the one or other is heard
        self._sounding = 0  # windows that are not silent

    def mix(self, name: str, samples: Floats, channel_names: tuple[str, ...], rate: int) -> Floats:
        """Make one channel: (S, C) -> (S,); `channel_names` are FFmpeg's, such as FL and FC."""
        count = samples.shape[1]
        if self.channel is not None:
            if not 0 <= self.channel < count:
                fault = f"{name} has no channel {self.channel}: it has {count}, counted from 0."
                raise AudioError("no such channel", fault)
            return samples[:, self.channel]
        if count == 1:
            return samples[:, 0]
        weights = [1 / count] * count
        if CENTER in channel_names:
            weights = [WEIGHTS.get(channel, SURROUND_WEIGHT) for channel in channel_names]
        mixed: Floats = samples @ np.array(weights, np.float32)
        if count == 2:
            self._compare(samples, mixed, rate // WINDOWS_PER_SECOND)
        return mixed

    def _compare(self, samples: Floats, mixed: Floats, window: int) -> None:
        count = len(mixed) // window * window
        left, right, mix = (
            np.square(signal[:count]).reshape(-1, window).mean(1)  # (W,)
            for signal in (samples[:, 0], samples[:, 1], mixed)
        )
        is_sounding = left + right > SILENCE_POWER
        self._sounding += int(is_sounding.sum())
        self._one_sided += [
            int((is_sounding & (left > MIN_POWER_RATIO * right)).sum()),
            int((is_sounding & (right > MIN_POWER_RATIO * left)).sum()),
        ]
        self._powers += [float((left + right).sum() / 2), float(mix.sum())]

    @property
    def fault(self) -> str:
        """What the mix of a file's two channels loses, "" for nothing."""
        power, mixed = self._powers
        if self._sounding and mixed < CANCELED_SHARE * power:
            return CANCEL
        if self._sounding and self._one_sided.min() > MIN_SHARE * self._sounding:
            return DIFFER
        return ""

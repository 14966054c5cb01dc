"""Reduce the channels of a file to one, and find out whether two cancel each other out.

Legend: S samples, C channels.
"""

import numpy as np

from sbkit.audio.containers import AudioError
from sbkit.base.arrays import Float32s

# The center has the speech and keeps its level; the bass is dropped. FFmpeg has the same weights.
CENTER, BASS = "FC", "LFE"
DOWNMIX_WEIGHTS = {CENTER: 1.0, "FL": 0.5**0.5, "FR": 0.5**0.5, BASS: 0.0}
SURROUND_WEIGHT = 0.5
CANCELED_SHARE = 0.05  # of the channels' power; independent channels leave half of it
CANCEL = "cancel each other out"  # how two channels lose speech when they are downmixed


class Downmixer:
    """Select one channel of a file or downmix all, and compare the power of two with their downmix.

    channel: the selected channel, counted from 0; None: downmix all.
    """

    def __init__(self, channel: int | None = None) -> None:
        self.channel = channel
        self.num_channels = 0  # of the file, once some of it was read
        self.rate = 0  # of the file in Hz, once some of it was read
        self.peak = 0.0  # of a file of floats, which is divided by it if it exceeds 1
        self._powers = np.zeros(2)  # of a channel and of the downmix, summed over samples

    def downmix(self, name: str, samples: Float32s, channel_names: tuple[str, ...]) -> Float32s:
        """Make one channel: (S, C) -> (S,); `channel_names` are FFmpeg's, such as FL and FC."""
        count = self.num_channels = samples.shape[1]
        if self.channel is not None:
            if not 0 <= self.channel < count:
                fault = f"{name} has no channel {self.channel}: it has {count}, counted from 0."
                raise AudioError("no such channel", fault)
            return samples[:, self.channel]
        if count == 1:
            return samples[:, 0]
        weights = [1 / count] * count
        if CENTER in channel_names:
            weights = [DOWNMIX_WEIGHTS.get(channel, SURROUND_WEIGHT) for channel in channel_names]
        downmixed: Float32s = samples @ np.array(weights, np.float32)
        if count == 2:
            self._powers += [np.vdot(samples, samples) / 2, np.vdot(downmixed, downmixed)]
        return downmixed

    @property
    def fault(self) -> str:
        """Why the downmix of the file's two channels loses speech; "" if it does not."""
        power, downmixed = self._powers
        return CANCEL if downmixed < CANCELED_SHARE * power else ""

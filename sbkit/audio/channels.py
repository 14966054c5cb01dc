"""Channels of a file: one of them, or their downmix, and whether two cancel each other out.

Legend: S samples, C channels.
"""

import numpy as np
import numpy.typing as npt

from sbkit.audio.containers import AudioError

Floats = npt.NDArray[np.float32]

# Speech is in the center, which keeps its level; the bass has none. FFmpeg has the same weights.
CENTER, BASS = "FC", "LFE"
WEIGHTS = {CENTER: 1.0, "FL": 0.5**0.5, "FR": 0.5**0.5, BASS: 0.0}
SURROUND_WEIGHT = 0.5
CANCELED_SHARE = 0.05  # of the channels' power; independent channels leave half of it
CANCEL = "cancel each other out"  # how two channels lose speech when they are downmixed


class Downmixer:
    """Make one channel of those of a file, and compare the power of two with their downmix's.

    channel: the one to take, counted from 0; None: downmix all.
    """

    def __init__(self, channel: int | None = None) -> None:
        self.channel = channel
        self.num_channels = 0  # of the file, once some of it was read
        self.peak = 0.0  # of a file of floats, by which it is divided if it exceeds 1
        self._powers = np.zeros(2)  # of a channel and of the downmix, summed over samples

    def downmix(self, name: str, samples: Floats, channel_names: tuple[str, ...]) -> Floats:
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
            weights = [WEIGHTS.get(channel, SURROUND_WEIGHT) for channel in channel_names]
        downmixed: Floats = samples @ np.array(weights, np.float32)
        if count == 2:
            self._powers += [np.vdot(samples, samples) / 2, np.vdot(downmixed, downmixed)]
        return downmixed

    @property
    def fault(self) -> str:
        """How the downmix of a file's two channels loses speech, "" if it does not."""
        power, downmixed = self._powers
        return CANCEL if downmixed < CANCELED_SHARE * power else ""

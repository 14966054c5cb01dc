"""The grid on which a format is compared with the trained model: batch x length x padding."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.inference.onnx_runtime import Counts, Floats

PADDINGS = ("none", "ragged", "beyond")
MORE = 1.0  # seconds past the longest, in "beyond"
NOISE_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One batch: audio (B, S) between -1 and 1, zero past its lengths (B,), and what it is."""

    audio: Floats
    lengths: Counts
    what: str


@dataclass(frozen=True)
class Grid:
    """Batch sizes, lengths in seconds, and how rows are padded.

    none: all rows are as long; ragged: each is shorter than the one before; beyond: ragged, and a
    second more of zeros than the longest has.
    """

    batches: tuple[int, ...] = (1, 2, 5)
    seconds: tuple[float, ...] = (0.3, 2.0, 10.0, 40.0)
    paddings: tuple[str, ...] = PADDINGS

    def cases(self, speech: Floats, sample_rate: int) -> Iterator[Case]:
        """Cut the cases out of speech (S,), which is repeated as often as it takes."""
        for batch in self.batches:
            for seconds in self.seconds:
                for padding in self.paddings:
                    if padding != "ragged" or batch > 1:
                        yield _case(speech, batch, seconds, padding, sample_rate)


def _case(speech: Floats, batch: int, seconds: float, padding: str, rate: int) -> Case:
    longest = seconds_to_samples(seconds, rate)
    shares = np.linspace(1.0, 0.4, batch) if padding != "none" else np.ones(batch)
    lengths = (longest * shares).astype(np.int64)
    more = seconds_to_samples(MORE, rate) + 1 if padding == "beyond" else 0  # of no round number
    audio = np.zeros((batch, longest + more), np.float32)
    for row, length in enumerate(lengths):
        begin = row * len(speech) // batch
        audio[row, :length] = np.take(speech, np.arange(begin, begin + length), mode="wrap")
    what = f"{batch} x {samples_to_seconds(longest, rate):g} s, padding: {padding}"
    return Case(audio, lengths, what)


def noise(sample_rate: int) -> Floats:
    """Make noise that grows and fades four times a second, where there is no speech: (S,)."""
    count = seconds_to_samples(NOISE_SECONDS, sample_rate)
    loudness = 0.5 + 0.5 * np.sin(np.arange(count) * (8 * np.pi / sample_rate))
    drawn = np.random.default_rng(0).standard_normal(count) * loudness
    made: Floats = (0.1 * drawn).clip(-1, 1).astype(np.float32)
    return made

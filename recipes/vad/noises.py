"""Noises to train with: coloured noise, and babble of training clips; a folder for `AddNoise`."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples, to_int16
from sbkit.base.files import write_bytes_atomically
from sbkit.base.units import seconds_to_samples
from sbkit.data.corpora.splits import Splits
from sbkit.data.storage.audio_store import encode, read_clips

SECONDS = 30.0  # of each file
COLOURS = (0.0, 0.5, 1.0, 1.0, 1.5, 2.0)  # the spectrum falls by 3 dB an octave, times this
TALKERS = (4, 6, 8, 10, 12, 16)  # of babble
LEVEL = 0.05  # root mean square, of full scale


def prepare_noises(knobs: Mapping[str, Any], splits: Splits) -> None:
    """Write the noises into the folder `noises`, unless it is there."""
    folder, rate = Path(knobs["noises"]), knobs["sample_rate"]
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    random, samples = np.random.default_rng(knobs["seed"]), seconds_to_samples(SECONDS, rate)
    order = random.permutation(len(splits.train)).tolist()
    clips = list(read_clips(splits.train, order[: 40 * max(TALKERS)]))
    noises = {f"colour-{n}": coloured(samples, each, random) for n, each in enumerate(COLOURS)}
    noises |= {f"babble-{each}": babble(clips, each, samples, random) for each in TALKERS}
    for name, noise in noises.items():
        content = encode(to_int16(LEVEL * noise), store="pcm", sample_rate=rate)
        write_bytes_atomically(folder / f"{name}.wav", content)


def coloured(samples: int, slope: float, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return noise (S,) of unit power, whose power falls with the frequency to ``slope``."""
    spectrum = np.fft.rfft(random.standard_normal(samples))
    return _normalized(
        np.fft.irfft(spectrum / np.arange(1, len(spectrum) + 1) ** (slope / 2), samples)
    )


def babble(
    clips: Sequence[Samples], talkers: int, samples: int, random: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Return so many clips at a time, each followed by another: (S,) of unit power."""
    total = np.zeros(samples)
    for _ in range(talkers):
        order = cycle(random.permutation(len(clips)).tolist())
        joined, length = list[npt.NDArray[np.float32]](), 0
        while length < samples:
            joined.append(_normalized(clips[next(order)].astype(np.float64)))
            length += len(joined[-1])
        total += np.concatenate(joined)[:samples]
    return _normalized(total)


def _normalized(signal: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return (signal / max(1e-9, float(np.sqrt(np.mean(np.square(signal)))))).astype(np.float32)

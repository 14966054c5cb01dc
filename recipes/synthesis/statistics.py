"""How far what is synthesized is from what was recorded, on the durations of the recording."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.files import write_bytes_atomically
from sbkit.logs.metric import as_words
from sbkit.tasks.synthesis import SYNTHESIS

SEMITONES = 12  # in an octave
DRAWN = 3  # utterances of a test set
Floats = npt.NDArray[Any]


class Shown(NamedTuple):
    """What is drawn of an utterance.

    id; symbols and the frame that each ends at; recorded, synthesized: audio (S,); expected, found:
    normalized features (U, F); voiced (U,); octaves, predicted (U,): the pitch.
    """

    id: str
    symbols: list[str]
    ends: list[int]
    recorded: Samples
    synthesized: Samples
    expected: Floats
    found: Floats
    voiced: Floats
    octaves: Floats
    predicted: Floats


class SpokenUtterance(NamedTuple):
    """What is measured of an utterance.

    frames; distance: the sum over them of the mean difference of log-mel features; voiced: frames
    with a pitch; squares: the sum over these of the squares of octaves that it is off; predicted:
    frames by the durations; vocoded: the mean difference of features of what the vocoder makes of
    the clip's own; is_misaligned: whether its text is not what is said; shown: of a few.
    """

    frames: int
    distance: float
    voiced: int
    squares: float
    predicted: float
    vocoded: float
    is_misaligned: bool
    shown: Shown | None = None


def measure(results: Sequence[SpokenUtterance]) -> Mapping[str, float]:
    """Return the distances in nats, the error of the pitch in semitones, and two ratios.

    distance: the sum of both others, by which the best checkpoint is chosen.
    """
    frames, distance, voiced, squares, predicted, vocoded, wrong = (
        math.fsum(each) for each in zip(*(result[:-1] for result in results), strict=True)
    )
    return {
        "distance": distance / frames + vocoded / len(results),
        "mel_distance": distance / frames,
        "vocoder_distance": vocoded / len(results),
        "pitch_error": SEMITONES * math.sqrt(squares / max(1, voiced)),
        "length_ratio": predicted / frames,
        "misaligned": wrong / len(results),
    }


def describe(results: Sequence[SpokenUtterance]) -> str:
    """Write the figures for the screen."""
    return ", ".join(as_words(SYNTHESIS.metrics, measure(results)))


def report(
    folder: Path, split: str, results: Sequence[SpokenUtterance], sample_rate: int
) -> Mapping[str, float]:
    """Draw a few utterances of a test set as `speech_SPLIT.png`; return the figures.

    Their audio is beside it: `speech_SPLIT.N_recorded.mp3` and `speech_SPLIT.N_synthesized.mp3`.
    """
    from sbkit.data.report import MP3_RATES, encode_mp3  # needs what only training installs

    shown = [each.shown for each in results if each.shown is not None][:DRAWN]
    write_bytes_atomically(folder / f"speech_{split}.png", picture(shown))
    if sample_rate in MP3_RATES:
        for number, each in enumerate(shown, 1):
            for what in ("recorded", "synthesized"):
                content = encode_mp3(getattr(each, what), sample_rate)
                write_bytes_atomically(folder / f"speech_{split}.{number}_{what}.mp3", content)
    return measure(results)


def picture(shown: Sequence[Shown]) -> bytes:
    """Draw recordings and, beside each, what is synthesized, with its symbols and pitch, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(14, 3 * len(shown)), layout="constrained")
    for each, axes in zip(shown, figure.subplots(len(shown), 2, squeeze=False), strict=True):
        for side, (what, features, octaves) in enumerate(
            (("recorded", each.expected, each.octaves), ("synthesized", each.found, each.predicted))
        ):
            hops = features.reshape(2 * len(features), -1)  # a frame is two hops
            extent = (0, len(features), 0, hops.shape[1])
            axes[side].imshow(hops.T, origin="lower", aspect="auto", extent=extent)
            pitch = np.where(each.voiced, (octaves + 1.5) * hops.shape[1] / 3, np.nan)
            axes[side].plot(np.arange(len(pitch)) + 0.5, pitch, "r", label="pitch")
            starts = [0, *each.ends[:-1]]
            axes[side].vlines(starts, 0, hops.shape[1], "w", lw=0.3)
            middles = np.add(starts, each.ends) / 2
            axes[side].set_xticks(middles, each.symbols, fontsize=6)
            axes[side].set(title=f"{each.id}, {what}", yticks=[])
    figure.savefig(png := io.BytesIO(), format="png", dpi=80)
    return png.getvalue()

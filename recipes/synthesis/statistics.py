"""The distance of synthesized from recorded speech, on the durations of the recording."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples
from sbkit.base.files import write_bytes_atomically
from sbkit.logs.metric import describe_values
from sbkit.tasks.synthesis import SYNTHESIS

SEMITONES = 12  # in an octave
NUM_EXAMPLES = 3  # utterances of a test set that are drawn
Array = npt.NDArray[Any]


class Example(NamedTuple):
    """An utterance that is drawn and written as audio.

    Attributes:
        symbols: of the text.
        ends: the frame at which each symbol ends.
        recorded, synthesized: audio (S,).
        target, predicted: normalized features (U, F).
        voiced: (U,).
        octaves, predicted_octaves: the pitch (U,).
    """

    id: str
    symbols: list[str]
    ends: list[int]
    recorded: Samples
    synthesized: Samples
    target: Array
    predicted: Array
    voiced: Array
    octaves: Array
    predicted_octaves: Array


class SpokenUtterance(NamedTuple):
    """The measurements of an utterance.

    Attributes:
        frames: their number.
        distance: the sum over frames of the mean difference of log-mel features.
        voiced: the number of voiced frames.
        squares: the sum over voiced frames of the squared error of the pitch, in octaves.
        predicted_frames: by the predicted durations.
        vocoder_distance: the mean difference of features after vocoding the recording's features.
        is_misaligned: whether its text does not match its audio.
        example: of the first utterances of a test set.
    """

    frames: int
    distance: float
    voiced: int
    squares: float
    predicted_frames: float
    vocoder_distance: float
    is_misaligned: bool
    example: Example | None = None


def measure(results: Sequence[SpokenUtterance]) -> Mapping[str, float]:
    """Return the distances in nats, the error of the pitch in semitones, and two ratios.

    distance: the sum of the other distances, which chooses the best checkpoint.
    """
    frames, distance, voiced, squares, predicted_frames, vocoder_distance, misaligned = (
        math.fsum(values) for values in zip(*(result[:-1] for result in results), strict=True)
    )
    return {
        "distance": distance / frames + vocoder_distance / len(results),
        "mel_distance": distance / frames,
        "vocoder_distance": vocoder_distance / len(results),
        "pitch_error": SEMITONES * math.sqrt(squares / max(1, voiced)),
        "length_ratio": predicted_frames / frames,
        "misaligned": misaligned / len(results),
    }


def describe(results: Sequence[SpokenUtterance]) -> str:
    """Write the figures for the screen."""
    return ", ".join(describe_values(SYNTHESIS.metrics, measure(results)))


def report(
    folder: Path, split: str, results: Sequence[SpokenUtterance], sample_rate: int
) -> Mapping[str, float]:
    """Draw a few utterances of a test set as `speech_SPLIT.png`; return the figures.

    Their audio is `speech_SPLIT.N_recorded.mp3` and `speech_SPLIT.N_synthesized.mp3`.
    """
    from sbkit.data.report import MP3_RATES, encode_mp3  # needs packages of training

    examples = [result.example for result in results if result.example is not None]
    examples = examples[:NUM_EXAMPLES]
    write_bytes_atomically(folder / f"speech_{split}.png", draw(examples))
    if sample_rate in MP3_RATES:
        for number, example in enumerate(examples, 1):
            for name in ("recorded", "synthesized"):
                content = encode_mp3(getattr(example, name), sample_rate)
                write_bytes_atomically(folder / f"speech_{split}.{number}_{name}.mp3", content)
    return measure(results)


def draw(examples: Sequence[Example]) -> bytes:
    """Draw recordings beside their synthesis, with symbols and pitch, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(14, 3 * len(examples)), layout="constrained")
    rows = figure.subplots(len(examples), 2, squeeze=False)
    for example, (left, right) in zip(examples, rows, strict=True):
        for axes, title, features, octaves in (
            (left, "recorded", example.target, example.octaves),
            (right, "synthesized", example.predicted, example.predicted_octaves),
        ):
            hops = features.reshape(2 * len(features), -1)  # a frame is two hops
            extent = (0, len(features), 0, hops.shape[1])
            axes.imshow(hops.T, origin="lower", aspect="auto", extent=extent)
            pitch = np.where(example.voiced, (octaves + 1.5) * hops.shape[1] / 3, np.nan)
            axes.plot(np.arange(len(pitch)) + 0.5, pitch, "r", label="pitch")
            starts = [0, *example.ends[:-1]]
            axes.vlines(starts, 0, hops.shape[1], "w", lw=0.3)
            middles = np.add(starts, example.ends) / 2
            axes.set_xticks(middles, example.symbols, fontsize=6)
            axes.set(title=f"{example.id}, {title}", yticks=[])
    figure.savefig(png := io.BytesIO(), format="png", dpi=80)
    return png.getvalue()

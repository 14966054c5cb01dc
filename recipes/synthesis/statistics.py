"""How far what is synthesized is from what was recorded, on the durations of the recording."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sbkit.logs.metric import Metric, Metrics, as_words

SEMITONES = 12  # in an octave
METRICS: Metrics = {
    "distance": Metric(is_fraction=False),
    "mel_distance": Metric(is_fraction=False),
    "vocoder_distance": Metric(is_fraction=False),
    "pitch_error": Metric(is_fraction=False),
    "length_ratio": Metric(is_fraction=False),
    "misaligned": Metric(),
}


class SpokenUtterance(NamedTuple):
    """What is measured of an utterance.

    frames; distance: the sum over them of the mean difference of log-mel features; voiced: frames
    with a pitch; squares: the sum over these of the squares of octaves that it is off; predicted:
    frames by the durations; vocoded: the mean difference of features of what the vocoder makes of
    the clip's own; is_misaligned: whether its text is not what is said.
    """

    frames: int
    distance: float
    voiced: int
    squares: float
    predicted: float
    vocoded: float
    is_misaligned: bool


def measure(results: Sequence[SpokenUtterance]) -> Mapping[str, float]:
    """Return the distances in nats, the error of the pitch in semitones, and two ratios.

    distance: the sum of both others, by which the best checkpoint is chosen.
    """
    frames, distance, voiced, squares, predicted, vocoded, wrong = (
        math.fsum(each) for each in zip(*results, strict=True)
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
    return ", ".join(as_words(METRICS, measure(results)))

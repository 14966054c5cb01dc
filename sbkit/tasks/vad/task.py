"""The task of voice activity detection: whether each frame is speech.

The column `speech` has the start and end of each span of speech, in seconds. A window of 20 ms is
speech unless it is as quiet as a pause or, if a recognizer aligns the transcript, no word is near:
breath and clicks do not count. Short pauses do.

Legend: S samples, U frames, W windows.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.audio.io import Samples
from sbkit.audio.segments import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.arrays import Bools
from sbkit.base.errors import DataError
from sbkit.base.messages import short_value
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.task import Figures, Labels, Task
from sbkit.logs.metric import Metric, Metrics, ratio
from sbkit.text.recognized_word import Word

DELAY_FRAMES = 4  # lookahead: the model classifies a frame once it has heard 4 more
MISS_WEIGHT = 0.75  # of misses in the detection cost function (DCF) of NIST's OpenSAT
SPEECH = "speech"  # the column
# Columns in which other toolkits label clips. NeMo's `label` says speech or background.
LABEL_COLUMNS = (
    *("label", "labels", "class", "target", "targets", "is_speech", "vad", "vad_label"),
    *("vad_labels", "vad_segments", "speech_segments", "speech_timestamps", "segments"),
)
NO_SPEECH = {  # without spaces and marks, as in "no_speech" and "_background_noise_"
    *("nospeech", "nonspeech", "no", "noise", "silence", "sil", "music"),
    *("background", "backgroundnoise"),
}
# What is no word: truth values (pandas writes 1.0 for 1), frames (0 1 1), and lists or spans of
# segments
_OTHER_LABELS = re.compile(
    r"(?is)true|false|[01](\.0)?([\s,;]+[01](\.0)?)*|[\[{]\s*[\d\[{\"'\]}].*"
    r"|\d[\d.]*-\d[\d.]*([\s,;]+\d[\d.]*-\d[\d.]*)*"
)
WORD_MARGIN_SECONDS = 0.1  # around an aligned word
MAX_EXCESS_SECONDS = 0.5  # of a span beyond its clip
SPANS_ADVICE = (
    "Write the start and the end in seconds, not in milliseconds or samples: 0.24-1.52 1.80-2.10."
)


class FrameCounts(NamedTuple):
    """Counts of frames of an utterance; false alarms are silence taken for speech."""

    speech: int
    missed: int
    silence: int
    false_alarms: int


class VadTask(Task):
    """Voice activity detection."""

    model_name = "voice activity detector"
    predicts = "speech"
    uses = ("transcribe RECOGNIZER talk.wav --vad FOLDER",)
    metrics: ClassVar[Metrics] = {
        "DCF": Metric(),
        "miss": Metric(counts=lambda result: (result.missed, result.speech)),
        "false_alarm": Metric(counts=lambda result: (result.false_alarms, result.silence)),
    }
    hub_task = "voice-activity-detection"

    def model_class(self) -> Any:
        from sbkit.tasks.vad.model import VadModel

        return VadModel

    def read_outputs(self, outputs: Any, labels: Labels) -> list[Bools]:
        """Return which frames (U,) of each clip are speech."""
        log_probs, frames = outputs
        speech = log_probs.argmax(2).bool().cpu().numpy()
        return [row[:count] for row, count in zip(speech, frames.tolist(), strict=True)]

    def result(self, prediction: Bools, row: Mapping[str, Any], **options: Any) -> FrameCounts:
        """Compare each frame with the window that was heard `DELAY_FRAMES` before."""
        rate = options["config"].sample_rate
        padding = (DELAY_FRAMES, len(prediction))
        speech = np.pad(speech_of(row, rate), padding)[: len(prediction)]
        frames = (speech, speech & ~prediction, ~speech, ~speech & prediction)
        return FrameCounts(*(int(frame.sum()) for frame in frames))

    def measure(self, results: Sequence[FrameCounts]) -> Mapping[str, float]:
        """Return the miss rate (of speech), the false-alarm rate (of silence), and their DCF."""
        speech, missed, silence, alarms = map(sum, zip(*results, strict=True))
        miss = ratio(missed, speech)
        false_alarm = ratio(alarms, silence)
        cost = MISS_WEIGHT * miss + (1 - MISS_WEIGHT) * false_alarm
        return {"DCF": cost, "miss": miss, "false_alarm": false_alarm}

    def figures(self, results: Sequence[FrameCounts]) -> Figures:
        """Return the numbers of frames with and without speech."""
        speech, _, silence, _ = map(sum, zip(*results, strict=True))
        return {"speech_frames": speech, "silence_frames": silence}


# ---- labels


def speech_of(row: Mapping[str, Any], sample_rate: int) -> Bools:
    """Label the windows of a clip: -> (W,).

    By its column `speech`; or else by its level, unless another column says that it is no speech.
    """
    value = row.get(SPEECH)
    if isinstance(value, np.ndarray):  # the labels themselves
        return value
    samples = row["audio"]
    if value is None:
        speech = find_speech(samples, sample_rate)
        return speech & (not any(is_no_speech(name, row[name]) for name in row))
    try:
        spans = parse_spans(value, samples_to_seconds(len(samples), sample_rate))
    except ValueError as error:
        raise DataError(
            f"`{SPEECH}` must have spans within the clip, but in {row['id']} it is "
            f"{short_value(value)}. {SPANS_ADVICE}"
        ) from error
    speech = np.zeros(len(samples) // (sample_rate // WINDOWS_PER_SECOND), np.bool_)
    for start, end in spans:
        speech[round(start * WINDOWS_PER_SECOND) : round(end * WINDOWS_PER_SECOND)] = True
    return speech


def is_no_speech(column: str, value: object) -> bool:
    """Check whether a column of another toolkit says that a clip has no speech.

    Raises DataError for labels in a form that is not read.
    """
    if column.strip().lower() not in LABEL_COLUMNS or not isinstance(value, str):
        return False
    if _OTHER_LABELS.fullmatch(value.strip()):
        raise DataError(
            f"`{column}` has the label {short_value(value)}, but speech is labeled in a column "
            f"`{SPEECH}`, or `{column}` has words, such as speech and background. {SPANS_ADVICE} "
            "Rename a column that has other labels."
        )
    parts = re.split(r"[,;|/+]", value.lower())
    return {re.sub(r"[\W_]+", "", part) for part in parts} <= NO_SPEECH


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None = None) -> Bools:
    """Label the windows of clean audio as speech: (S,) -> (W,)."""
    window = sample_rate // WINDOWS_PER_SECOND
    speech = np.ones(len(samples) // window, np.bool_)
    for first, end in find_pauses(samples, window):
        speech[first:end] = False
    if words is not None:
        is_near_word = np.zeros_like(speech)
        for word in words:
            first = max(0, round((word.start - WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND))
            end = round((word.end + WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND)
            is_near_word[first:end] = True
        speech &= is_near_word
    spoken = np.flatnonzero(speech)
    lengths = np.diff(spoken)  # the windows of a pause, plus one
    is_bridged = (lengths > 1) & (lengths <= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND)
    for index in np.flatnonzero(is_bridged):  # such as the closure of a consonant
        speech[spoken[index] : spoken[index + 1]] = True
    return speech


def parse_spans(value: str, seconds: float) -> list[tuple[float, float]]:
    """Return the start and the end of each span; raise ValueError if one is not in the clip."""
    pairs = (span.split("-") for span in value.split())
    spans = [(float(start), float(end)) for start, end in pairs]
    if not all(0 <= start <= end <= seconds + MAX_EXCESS_SECONDS for start, end in spans):
        raise ValueError(f"{value} is not within {seconds} s")
    return spans

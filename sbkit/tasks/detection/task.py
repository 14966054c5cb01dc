"""The task of voice activity detection: whether each frame is speech."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.base.arrays import Bools
from sbkit.bundle.task import Labels, Task
from sbkit.logs.metric import Metric, Metrics, ratio
from sbkit.tasks.detection.speech_labels import speech_of

DELAY_FRAMES = 4  # lookahead: the model classifies a frame once it has heard 4 more
MISS_WEIGHT = 0.75  # of misses in the detection cost function (DCF) of NIST's OpenSAT


class FrameCounts(NamedTuple):
    """Counts of frames of an utterance; false alarms are silence taken for speech."""

    speech: int
    missed: int
    silence: int
    false_alarms: int


class Detection(Task):
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
        from sbkit.tasks.detection.model import VoiceActivityModel

        return VoiceActivityModel

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

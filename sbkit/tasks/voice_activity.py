"""The task of voice activity: whether each frame is speech."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sbkit.logs.metric import Metric
from sbkit.tasks.task import Task

DELAY = 4  # frames that the model has heard after the one that it judges
MISS_WEIGHT = 0.75  # of misses in DCF, the detection cost of NIST's OpenSAT


class FrameCounts(NamedTuple):
    """Frames of an utterance: of speech, those missed, of silence, and those taken for speech."""

    speech: int
    missed: int
    silence: int
    false_alarms: int


def frame_errors(results: Sequence[FrameCounts]) -> Mapping[str, float]:
    """Divide the misses by the frames of speech, and false alarms by those of silence."""
    speech, missed, silence, false = map(sum, zip(*results, strict=True)) if results else [0] * 4
    miss, false_alarm = missed / max(1, speech), false / max(1, silence)
    cost = MISS_WEIGHT * miss + (1 - MISS_WEIGHT) * false_alarm
    return {"DCF": cost, "miss": miss, "false_alarm": false_alarm}


VOICE_ACTIVITY = Task(
    name="sbkit.tasks.voice_activity.VOICE_ACTIVITY",
    model_name="detector of voice activity",
    hub_task="voice-activity-detection",
    model_class="sbkit.models.voice_activity.VoiceActivityModel",
    metrics=dict.fromkeys(("DCF", "miss", "false_alarm"), Metric()),
    commands=("transcribe --vad",),
)

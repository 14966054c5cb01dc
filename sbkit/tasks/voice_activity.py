"""The task of voice activity detection: whether each frame is speech."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sbkit.logs.metric import Metric
from sbkit.tasks.task import Exportable, Task

DELAY_FRAMES = 4  # that the model hears after the frame that it judges
MISS_WEIGHT = 0.75  # of misses in DCF, the detection cost function of NIST's OpenSAT


class FrameCounts(NamedTuple):
    """Frames of an utterance: speech, missed speech, silence, and silence taken for speech."""

    speech: int
    missed: int
    silence: int
    false_alarms: int


def frame_errors(results: Sequence[FrameCounts]) -> Mapping[str, float]:
    """Return DCF, missed speech by all speech, and false alarms by all silence."""
    speech, missed, silence, alarms = map(sum, zip(*results, strict=True)) if results else [0] * 4
    miss, false_alarm = missed / max(1, speech), alarms / max(1, silence)
    cost = MISS_WEIGHT * miss + (1 - MISS_WEIGHT) * false_alarm
    return {"DCF": cost, "miss": miss, "false_alarm": false_alarm}


VOICE_ACTIVITY = Task(
    name="sbkit.tasks.voice_activity.VOICE_ACTIVITY",
    model_name="voice activity detector",
    predicts="speech",
    metrics=dict.fromkeys(("DCF", "miss", "false_alarm"), Metric()),
    export=Exportable(
        model_class="sbkit.models.voice_activity.VoiceActivityModel",
        hub_task="voice-activity-detection",
    ),
)

"""Nothing is scored on nothing: an interrupted or empty validation has no figures."""

import math
from typing import Any

import pytest

from recipes.asr.recipe import AsrBrain
from sbkit.tasks.codec import CODEC
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.tasks.synthesis import SYNTHESIS
from sbkit.tasks.task import Task
from sbkit.tasks.utterance_classification import UTTERANCE_CLASSIFICATION
from sbkit.tasks.voice_activity import VOICE_ACTIVITY
from sbkit.train.evaluation import EvaluationHooks, Evaluator

TASKS = (SPEECH_RECOGNITION, UTTERANCE_CLASSIFICATION, VOICE_ACTIVITY, CODEC, SYNTHESIS)


@pytest.mark.parametrize("task", [*TASKS, Task(name="own", model_name="own")], ids=lambda t: t.name)
def test_metrics_of_no_utterance_are_nan(task: Task) -> None:
    values = task.scorer.measure([])
    assert [*values] == [*task.metrics]
    assert all(map(math.isnan, values.values()))


def test_own_metric_of_no_utterance_is_not_computed() -> None:
    class Mean(EvaluationHooks):
        metrics = AsrBrain.metrics

        def measure(self, results: Any) -> dict[str, float]:
            return {"CER": sum(results) / len(results)}

    evaluator = Evaluator(Mean())
    evaluator.start(["full", "empty"])
    evaluator.enter("full")
    evaluator.add([0.25, 0.75])
    values = evaluator.measure_splits()
    assert values["CER"] == values["full/CER"] == 0.5
    assert math.isnan(values["empty/CER"])

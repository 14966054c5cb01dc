"""Nothing is scored on nothing: an interrupted or empty validation has no figures."""

import math
from typing import Any

from recipes.asr.recipe import AsrBrain
from sbkit.train.evaluation import EvaluationHooks, Evaluator


def test_metric_of_no_utterance_is_not_computed() -> None:
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

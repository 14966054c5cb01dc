"""Nothing is scored on nothing: an interrupted or empty validation has no figures."""

import math

from recipes.asr.recipe import AsrBrain
from sbkit.train.evaluation import Evaluator


def test_metric_of_no_utterance_is_not_computed() -> None:
    evaluator = Evaluator(AsrBrain.metrics, lambda results: {"CER": sum(results) / len(results)})
    evaluator.start(["full", "empty"])
    evaluator.enter("full")
    evaluator.add([0.25, 0.75])
    values = evaluator.measure_splits()
    assert values["CER"] == values["full/CER"] == 0.5
    assert math.isnan(values["empty/CER"])

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit import Metric


class MyBrain(AsrBrain):
    metrics = {**AsrBrain.metrics, "exact": Metric(lower_is_better=False)}

    def measure(self, results):
        exact = [result.hypothesis == result.reference for result in results]
        return {**super().measure(results), "exact": sum(exact) / max(1, len(exact))}


class Mine(AsrRecipe):
    brain = MyBrain

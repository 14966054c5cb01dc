"""The task of synthesis: text to speech. It imports no torch, which ONNX does without."""

from recipes.synthesis.statistics import METRICS
from sbkit.tasks.task import LabelFile, Task
from sbkit.text.labels import ClassLabels

SYNTHESIS = Task(
    name="recipes.synthesis.task.SYNTHESIS",
    model_name="synthesizer",
    hub_task="text-to-speech",
    model_class="recipes.synthesis.parts.SynthesisModel",
    labels=LabelFile(
        name="symbols.txt",
        key="labels",
        read=lambda file, content: ClassLabels(file=file, content=content),
        names=lambda labels: labels.names,
        arguments=lambda labels: {},
    ),
    metrics=METRICS,
    commands=("speak",),
)

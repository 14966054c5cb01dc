"""The task of synthesis: text to speech. It imports no torch, which ONNX does without.

Legend: B utterances, S samples, L symbols.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recipes.synthesis.statistics import METRICS
from recipes.synthesis.synthesizer import Synthesizer, speak
from sbkit.base.units import SAMPLE_RATE
from sbkit.tasks.task import Graph, LabelFile, Task
from sbkit.text.labels import ClassLabels

Arrays = Sequence[np.ndarray[Any, Any]]
PER_SECOND = 10  # symbols of text that stand for audio
IDS = 3  # of symbols, as every voice has them


def text_of(run: Any, audio: Any, lengths: Any) -> Arrays:
    """Return symbols for a batch of audio: (B, S) -> (B, L)."""
    count = max(1, audio.shape[1] * PER_SECOND // SAMPLE_RATE)
    return (np.random.default_rng(count).integers(0, IDS, (len(audio), count)),)


def states_of(run: Callable[..., Arrays], audio: Any, lengths: Any) -> Arrays:
    """Return the states of symbols, and which of them four frames each are of."""
    states, durations = run("encode", *text_of(run, audio, lengths))
    index = np.arange(durations.shape[1]).repeat(4)
    return states, np.tile(index, (len(states), 1))


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
    runs={"speak": speak},
    load=Synthesizer.load,
    graphs={
        "encode": Graph(inputs=("symbols",), outputs=("states", "durations"), arguments=text_of),
        "decode": Graph(inputs=("states", "index"), outputs=("audio",), arguments=states_of),
    },
)

"""The task of classifying whole utterances, and its accuracy with a 95 % interval."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.files import write_text_atomically
from sbkit.evaluate.intervals import Interval, group_by_speaker, rate_interval
from sbkit.logs.metric import Metric
from sbkit.tasks.task import Exportable, LabelFile, Scorer, Task
from sbkit.text.vocabulary import LABEL_FILE, ClassLabels


class Classified(NamedTuple):
    """The class of an utterance and its prediction; ``speaker`` is "" if unknown."""

    id: str
    target: str
    predicted: str
    speaker: str = ""

    @property
    def is_right(self) -> bool:
        return self.target == self.predicted


def accuracy(results: Sequence[Classified]) -> float:
    """Return the fraction of correct predictions; 0 without results."""
    return sum(result.is_right for result in results) / max(1, len(results))


def accuracy_figures(results: Sequence[Classified]) -> dict[str, Any]:
    """Return the accuracy of a split with its counts and its 95 % interval."""
    groups = group_by_speaker(
        [result.id for result in results], [result.speaker for result in results]
    )
    right = np.array([result.is_right for result in results], dtype=np.int64)
    return {
        "accuracy": accuracy(results),
        "right": int(right.sum()),
        "utterances": len(results),
        "accuracy_interval": asdict(rate_interval(right, np.ones_like(right), groups)),
    }


def describe_accuracy(results: Sequence[Classified]) -> str:
    """Return a line with the accuracy, its counts and its 95 % interval."""
    figures = accuracy_figures(results)
    counts = f"{figures['right']} / {figures['utterances']}"
    interval = Interval(**figures["accuracy_interval"])
    return f"accuracy {100 * figures['accuracy']:.1f} % ({counts}; {interval})"


def classify_rows(
    bundle: Any, rows: Sequence[Mapping[str, Any]], clips: list[Samples], *, label: str, **_: Any
) -> list[Classified]:
    """Classify the clips of rows with a bundle, and compare with the column ``label``."""
    predicted = bundle.classify(clips).argmax(1).tolist()
    return [
        Classified(row["id"], str(row[label]), bundle.labels.names[id], row.get("speaker", ""))
        for row, id in zip(rows, predicted, strict=True)
    ]


def _report_classes(folder: Path, name: str, results: Sequence[Classified]) -> Mapping[str, Any]:
    rows = [("id", "right", "found"), *(result[:3] for result in results)]
    lines = ["\t".join(" ".join(field.split()) for field in row) for row in rows]
    write_text_atomically(folder / f"answers_{name}.tsv", "\n".join(lines) + "\n")
    return accuracy_figures(results)


UTTERANCE_CLASSIFICATION = Task(
    name="sbkit.tasks.utterance_classification.UTTERANCE_CLASSIFICATION",
    model_name="speech classifier",
    predicts="label",
    metrics={"accuracy": Metric(lower_is_better=False)},
    labels=LabelFile(
        name=LABEL_FILE,
        key="labels",
        read=lambda file, content: ClassLabels(file=file, content=content),
        names=lambda labels: labels.names,
        arguments=lambda labels: {"num_classes": labels.size},
    ),
    heads=("label_lin",),
    scorer=Scorer(
        target="label",
        score=classify_rows,
        measure=accuracy_figures,
        describe=describe_accuracy,
        report=_report_classes,
    ),
    export=Exportable(
        model_class="sbkit.models.classifier.UtteranceClassifier", hub_task="audio-classification"
    ),
)

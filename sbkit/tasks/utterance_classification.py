"""The task of classifying whole utterances, and its accuracy with a 95 % interval."""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import Counts
from sbkit.base.files import write_lines_atomically
from sbkit.evaluate.intervals import Interval, group_by_speaker, rate_intervals
from sbkit.logs.curves import write_picture
from sbkit.logs.metric import Metric
from sbkit.tasks.task import Exportable, Figures, LabelFile, Scorer, Task
from sbkit.text.vocabulary import LABEL_FILE, ClassLabels

MAX_DRAWN_CLASSES = 50  # a picture of 1,200 took more than five minutes
Confusion = Counts  # a row for each true class, a column for each prediction


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
    """Return the fraction of correct predictions; NaN without results."""
    return sum(result.is_right for result in results) / len(results) if results else math.nan


def accuracy_figures(results: Sequence[Classified]) -> dict[str, Any]:
    """Return the accuracy of a split with its counts and its 95 % interval."""
    groups = group_by_speaker(
        [result.id for result in results], [result.speaker for result in results]
    )
    right = np.array([[result.is_right for result in results]], dtype=np.int64)
    (interval,) = rate_intervals(right, np.ones_like(right), groups)
    return {
        "accuracy": accuracy(results),
        "right": int(right.sum()),
        "utterances": len(results),
        "accuracy_interval": asdict(interval),
    }


def describe_accuracy(figures: Figures) -> str:
    """Return a line with the accuracy, its counts and its 95 % interval."""
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


def report_classes(
    folder: Path, name: str, results: Sequence[Classified], _: Figures, labels: ClassLabels
) -> None:
    """Write each answer, and the confusion matrix as a table and a picture."""
    rows = chain([("id", "right", "found")], (result[:3] for result in results))
    lines = ("\t".join(" ".join(field.split()) for field in row) for row in rows)
    write_lines_atomically(folder / f"answers_{name}.tsv", lines)
    classes = labels.names
    pairs = Counter((result.target, result.predicted) for result in results)
    confusion = np.array([[pairs[target, answer] for answer in classes] for target in classes])
    table = [["right / found", *classes]]
    table += [[target, *map(str, row)] for target, row in zip(classes, confusion, strict=True)]
    write_lines_atomically(folder / f"confusion_{name}.tsv", map("\t".join, table))
    write_picture(folder / f"confusion_{name}.png", lambda: draw_confusion(confusion, classes))


def draw_confusion(confusion: Confusion, names: Sequence[str]) -> bytes:
    """Draw the share and the count of each prediction, for the classes with the most errors."""
    from matplotlib.figure import Figure  # 0.7 s to import

    shares = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    errors = confusion.sum(0) + confusion.sum(1) - 2 * confusion.diagonal()
    drawn = np.sort(np.argsort(-errors, kind="stable")[:MAX_DRAWN_CLASSES])
    confusion = confusion[np.ix_(drawn, drawn)]
    shares = shares[np.ix_(drawn, drawn)]
    names = [names[index] for index in drawn]
    inches = max(4.0, 0.5 * len(names))
    figure = Figure(figsize=(inches + 1, inches), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    for (row, column), count in np.ndenumerate(confusion):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    figure.savefig(png := io.BytesIO(), format="png", dpi=120)
    return png.getvalue()


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
        measure=lambda results: {"accuracy": accuracy(results)},
        figures=accuracy_figures,
        slice_figures=accuracy_figures,
        describe=describe_accuracy,
        report=report_classes,
        score=classify_rows,
        target="label",
    ),
    export=Exportable(
        model_class="sbkit.models.classifier.UtteranceClassifier", hub_task="audio-classification"
    ),
)

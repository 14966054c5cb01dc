"""The task of classifying whole utterances: one label of a list for each.

The accuracy of a classifier on a test set, with its 95 % interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.files import write_text_atomically
from sbkit.evaluate.intervals import Interval, rate_interval, units_of
from sbkit.logs.metric import Metric
from sbkit.tasks.task import LabelFile, Scorer, Task
from sbkit.text.vocabulary import LABEL_FILE, ClassLabels


class Answer(NamedTuple):
    """One utterance: its class, and the one that was found; ``speaker`` is "" where unknown."""

    id: str
    right: str
    found: str
    speaker: str = ""


def accuracy(answers: Sequence[Answer]) -> float:
    """Divide the right answers by all; 0 of none."""
    return sum(each.right == each.found for each in answers) / max(1, len(answers))


def accuracy_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the accuracy of a split with its counts and its 95 % interval."""
    units = units_of([each.id for each in answers], [each.speaker for each in answers])
    right = np.array([each.right == each.found for each in answers], dtype=np.int64)
    return {
        "accuracy": accuracy(answers),
        "right": int(right.sum()),
        "utterances": len(answers),
        "accuracy_interval": asdict(rate_interval(right, np.ones_like(right), units)),
    }


def describe_accuracy(answers: Sequence[Answer]) -> str:
    """Write the accuracy with its counts and 95 % interval, for the screen."""
    figures = accuracy_figures(answers)
    counts = f"{figures['right']} / {figures['utterances']}"
    interval = Interval(**figures["accuracy_interval"])
    return f"accuracy {100 * figures['accuracy']:.1f} % ({counts}; {interval})"


def classify_rows(
    bundle: Any, rows: Sequence[Mapping[str, Any]], clips: list[Samples], *, label: str, **_: Any
) -> list[Answer]:
    """Classify the clips of rows, and compare each with the column ``label``."""
    best = bundle.classify(clips).argmax(1).tolist()
    return [
        Answer(row["id"], str(row[label]), bundle.labels.names[each], row.get("speaker", ""))
        for row, each in zip(rows, best, strict=True)
    ]


def _report_answers(folder: Path, name: str, results: Sequence[Answer]) -> Mapping[str, Any]:
    rows = [("id", "right", "found"), *((each.id, each.right, each.found) for each in results)]
    lines = ["\t".join(" ".join(each.split()) for each in row) for row in rows]
    write_text_atomically(folder / f"answers_{name}.tsv", "\n".join(lines) + "\n")
    return accuracy_figures(results)


UTTERANCE_CLASSIFICATION = Task(
    name="sbkit.tasks.utterance_classification.UTTERANCE_CLASSIFICATION",
    model_name="classifier of speech",
    hub_task="audio-classification",
    model_class="sbkit.models.classifier.UtteranceClassifier",
    labels=LabelFile(
        name=LABEL_FILE,
        key="labels",
        read=lambda file, content: ClassLabels(file=file, content=content),
        names=lambda labels: labels.names,
        arguments=lambda labels: {"classes": labels.size},
    ),
    heads=("label_lin",),
    metrics={"accuracy": Metric(lower_is_better=False)},
    commands=("classify",),
    scorer=Scorer(
        target="label",
        score=classify_rows,
        measure=accuracy_figures,
        describe=describe_accuracy,
        report=_report_answers,
    ),
)

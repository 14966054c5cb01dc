"""The task of classifying whole utterances: one label of a list for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.files import write_text_atomically
from sbkit.evaluate.accuracy_report import Answer, accuracy_figures, describe_accuracy
from sbkit.logs.metric import Metric
from sbkit.tasks.task import LabelFile, Scorer, Task
from sbkit.text.labels import LABEL_FILE, ClassLabels


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

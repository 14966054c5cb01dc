"""Classify whole utterances: which language, which speaker, any column of the manifest.

Legend: B utterances, V classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from speechbrain import Stage
from torch import Tensor

from recipes.classification.confusion import count, draw, write_table
from sbkit.audio.augment import Augmentation
from sbkit.data.batch import Batch, collate_audio
from sbkit.logs.metric import Metrics
from sbkit.models.classifier import UtteranceClassifier
from sbkit.models.encoder import encoder_parts
from sbkit.models.loss import Loss
from sbkit.tasks.utterance_classification import (
    UTTERANCE_CLASSIFICATION,
    Classified,
    accuracy,
    accuracy_figures,
    describe_accuracy,
)
from sbkit.text.vocabulary import ClassLabels
from sbkit.train.brain import Brain


@dataclass(frozen=True, kw_only=True)
class LabelBatch(Batch):
    """Audio and the class of each utterance; classes (B,)."""

    ON_DEVICE = (*Batch.ON_DEVICE, "classes")

    classes: Tensor


def collate(
    rows: Sequence[Mapping[str, Any]], *, labels: ClassLabels, column: str, sample_rate: int
) -> LabelBatch:
    """Pad utterances to a batch, and read their class from a column."""
    fields = collate_audio(rows, sample_rate)
    ids = [labels.encode(row[column]) for row in rows]
    return LabelBatch(**fields, classes=fields["audio_lengths"].new_tensor(ids))


class ClassificationBrain(Brain):
    """Train the log-probability of the right class."""

    metrics: ClassVar[Metrics] = UTTERANCE_CLASSIFICATION.metrics

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        self.classifier = UtteranceClassifier(
            model=self.modules["model"],
            **encoder_parts(self.hparams.knobs),
            pooling=self.hparams.pooling,
            label_lin=self.hparams.label_lin,
            classes=self.hparams.labels.size,
        )
        self.classifier.to(self.device)
        self.augmentation = Augmentation(self.hparams, features=self.classifier.encoder.features)

    def compute_forward(self, batch: LabelBatch, stage: Stage) -> Tensor:
        """Compute the log-probability of every class from the audio: -> (B, V)."""
        training = stage is Stage.TRAIN
        audio, lengths = self.augmentation.audio(batch, training=training)
        hide = self.augmentation.features(training=training)
        return self.classifier.predict(audio, lengths, hide)

    def compute_objectives(self, log_probs: Tensor, batch: LabelBatch, stage: Stage) -> Loss:
        """Sum the negative log-likelihood of the right classes; each utterance counts once."""
        sums = -log_probs.gather(1, batch.classes.unsqueeze(1)).squeeze(1)
        return Loss(sums * batch.weights, batch.weights)

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        self.measure_features(self.classifier.encoder.features)

    def score(self, log_probs: Tensor, batch: LabelBatch) -> list[Classified]:
        """Compare the most probable class with the right one."""
        names = self.hparams.labels.names
        both = (batch.classes, log_probs.argmax(1))
        right, found = ([names[n] for n in ids.tolist()] for ids in both)
        return list(map(Classified, batch.ids, right, found, batch.speakers))

    def measure(self, results: Sequence[Classified]) -> Mapping[str, float]:
        """Divide the right answers by all."""
        return {"accuracy": accuracy(results)}

    def measure_slice(self, results: Sequence[Classified]) -> Mapping[str, Any]:
        """Return the accuracy with its interval."""
        return accuracy_figures(results)

    def describe(self, results: Sequence[Classified]) -> str:
        """Write the accuracy with its counts and interval."""
        return describe_accuracy(results)

    def report(self, split: str, results: Sequence[Classified], folder: Path) -> Mapping[str, Any]:
        """Write the confusion matrix as a table and a picture; return the counts."""
        names = self.hparams.labels.names
        counts = count(results, names)
        write_table(folder / f"confusion_{split}.tsv", counts, names)
        draw(folder / f"confusion_{split}.png", counts, names)
        return accuracy_figures(results)

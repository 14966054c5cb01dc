"""Classification of whole utterances by any column of the manifest: `--label=speaker`.

Legend: B utterances, V classes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from speechbrain import Stage
from torch import Tensor

from recipes.prepare import COMMON_RANGES, corpus_of, log_data, prepare_audio
from sbkit.audio.augment import Augmentation
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import listed
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.corpus import KnobValues
from sbkit.data.manifest import Excluded
from sbkit.data.shard import AUDIO, Row
from sbkit.data.splits import Splits, filled_rows, read_column
from sbkit.distributed.device import Placement
from sbkit.logs.metric import Metrics
from sbkit.models.classifier import UtteranceClassifier
from sbkit.models.encoder import encoder_parts
from sbkit.models.loss import Loss
from sbkit.tasks.task import Task
from sbkit.tasks.utterance_classification import UTTERANCE_CLASSIFICATION, Classified
from sbkit.text.vocabulary import LABEL_FILE, ClassLabels, ensure_labels
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe

AUDIO_COLUMNS = frozenset({"samples", AUDIO})  # the others are text
MAX_LISTED_LABELS = 10  # in an error


@dataclass(frozen=True, kw_only=True)
class LabelBatch(Batch):
    """Audio and the class of each utterance; classes (B,)."""

    ON_DEVICE = (*Batch.ON_DEVICE, "classes")

    classes: Tensor


def collate(
    rows: Sequence[Row], *, labels: ClassLabels, column: str, sample_rate: int
) -> LabelBatch:
    """Pad utterances to a batch, and read their classes from a column."""
    fields = collate_audio(rows, sample_rate)
    ids = [labels.encode(row[column]) for row in rows]
    return LabelBatch(**fields, classes=fields["audio_lengths"].new_tensor(ids))


class ClassificationBrain(Brain):
    """Train the log-probability of the right class."""

    network: UtteranceClassifier
    task: Task = UTTERANCE_CLASSIFICATION
    metrics: ClassVar[Metrics] = UTTERANCE_CLASSIFICATION.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.network = UtteranceClassifier(
            model=self.modules["model"],
            **encoder_parts(self.hparams.knobs),
            pooling=self.hparams.pooling,
            label_lin=self.hparams.label_lin,
            num_classes=self.hparams.labels.size,
        )
        self.network.to(self.device)
        self.augmentation = Augmentation(self.hparams, features=self.network.encoder.features)

    def compute_forward(self, batch: LabelBatch, stage: Stage) -> Tensor:
        """Compute the log-probability of every class from the audio: -> (B, V)."""
        training = stage is Stage.TRAIN
        audio, lengths = self.augmentation.augment_audio(batch, training=training)
        spec_augment = self.augmentation.feature_augmentation(training=training)
        return self.network.predict(audio, lengths, spec_augment)

    def compute_objectives(self, log_probs: Tensor, batch: LabelBatch, stage: Stage) -> Loss:
        """Sum the negative log-likelihood of the right classes; each utterance counts once."""
        sums = -log_probs.gather(1, batch.classes.unsqueeze(1)).squeeze(1)
        return Loss(sums * batch.weights, batch.weights)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.encoder.features)

    def score(self, log_probs: Tensor, batch: LabelBatch) -> list[Classified]:
        """Compare the most probable class with the true one."""
        names = self.hparams.labels.names
        targets = [names[id] for id in batch.classes.tolist()]
        predictions = [names[id] for id in log_probs.argmax(1).tolist()]
        return list(map(Classified, batch.ids, targets, predictions, batch.speakers))


# Data


def prepare_labeled(knobs: KnobValues) -> Splits:
    """Prepare audio and all columns of utterances whose column `label` is not empty."""
    splits = prepare_audio(knobs)
    column = knobs["label"]
    named = splits.named()
    excluded = [*splits.excluded]
    fingerprints = {**splits.fingerprints}
    for name, split in named.items():
        columns = [key for key in split.column_names if key not in AUDIO_COLUMNS]
        if column not in columns:
            raise ConfigError(
                f"`label` is {column!r}, which is not a column of {name} ({', '.join(columns)}). "
                "Choose one of them, or add it."
            )
        labeled = filled_rows(split, column)
        if not len(labeled):
            raise ConfigError(
                f"`label` names the column `{column}`, which is empty in all {len(split)} rows of "
                f"{name}. Fill it with classes, or choose another column."
            )
        ids = split.select(np.setdiff1d(np.arange(len(split)), labeled))["id"]
        excluded += [Excluded(id, "no label", f"{column} is empty", name) for id in ids]
        named[name] = split.select(labeled) if len(ids) else split
        labels = read_column(named[name], column)
        fingerprints[f"{name}, {column}"] = hashlib.sha256("\0".join(labels).encode()).hexdigest()
    classes = dict.fromkeys(read_column(named["train"], column))
    for name, split in named.items():
        for row, label in enumerate(read_column(split, column)):
            if label not in classes:
                raise DataError(
                    f"{split[row]['id']} of {name} has the label {label!r}, which is not among the "
                    f"{len(classes)} classes of the training set "
                    f"({listed(classes, max_names=MAX_LISTED_LABELS)}). Correct it, or take it out."
                )
    return replace(splits.with_named(named), excluded=excluded, fingerprints=fingerprints)


def prepare_labels(knobs: KnobValues, splits: Splits) -> ClassLabels:
    """List the classes of the training set."""
    names = read_column(splits.train, knobs["label"])
    return ensure_labels(Path(knobs["output_folder"]) / LABEL_FILE, names)


def make_label_loaders(
    hparams: Mapping[str, Any], splits: Splits, labels: ClassLabels, placement: Placement
) -> Loaders:
    """Plan the batches of every split."""
    log_data(splits, hparams)
    rate = hparams["sample_rate"]
    collate_by_label = partial(collate, labels=labels, column=hparams["label"], sample_rate=rate)
    return make_loaders(splits, hparams, collate=collate_by_label, placement=placement)


CLASSIFICATION = Recipe(
    task=UTTERANCE_CLASSIFICATION,
    prepare_splits=prepare_labeled,
    prepare_labels=prepare_labels,
    make_loaders=make_label_loaders,
    brain=ClassificationBrain,
    corpus=corpus_of,
    ranges=COMMON_RANGES,
)

"""The training of `language_id.py`: its Brain and its data. Legend: B utterances, V languages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from language_id import COLUMN, LanguageIdentification, LanguageModel
from speechbrain import Stage
from torch import Tensor

from recipes.prepare import CorpusRecipe, with_fingerprints
from sbkit.audio.augment import Augmentation
from sbkit.base.errors import DataError
from sbkit.config.hparams import Settings
from sbkit.data.batch import Batch, collate_audio
from sbkit.data.shard import Row
from sbkit.data.splits import Splits, read_column
from sbkit.models.loss import Loss
from sbkit.text.vocabulary import ClassLabels, ensure_labels
from sbkit.train.brain import Brain


@dataclass(frozen=True, kw_only=True)
class LanguageBatch(Batch):
    """Audio, and the language of each utterance."""

    ON_DEVICE = (*Batch.ON_DEVICE, "languages")
    languages: Tensor  # (B,)


class LanguageBrain(Brain):
    """Train the log-probability of the right language."""

    network: LanguageModel
    parts = ("compute_features", "CNN", "Transformer", "pooling", "language_lin")
    metrics = LanguageIdentification.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.augmentation = Augmentation(self.hparams, features=self.network.encoder.features)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.measure_normalization(self.network.encoder.features)

    def compute_forward(self, batch: LanguageBatch, stage: Stage) -> Tensor:
        training = stage is Stage.TRAIN
        audio, lengths = self.augmentation.augment_audio(batch, training=training)
        masks = self.augmentation.feature_augmentation(training=training)
        return self.network.predict(audio, lengths, masks)

    def compute_objectives(self, log_probs: Tensor, batch: LanguageBatch, stage: Stage) -> Loss:
        sums = -log_probs.gather(1, batch.languages.unsqueeze(1)).squeeze(1)
        return Loss(sums * batch.weights, batch.weights)


def collate(rows: Sequence[Row], *, languages: ClassLabels, sample_rate: int) -> LanguageBatch:
    """Pad utterances to a batch with the languages of the column."""
    fields = collate_audio(rows, sample_rate)
    ids = [languages.encode(row[COLUMN]) for row in rows]
    return LanguageBatch(**fields, languages=fields["audio_lengths"].new_tensor(ids))


class LanguageRecipe(CorpusRecipe):
    """Train on a column of languages."""

    task = LanguageIdentification()
    brain = LanguageBrain

    def prepare_splits(self, settings: Settings) -> Splits:
        """Prepare audio; a resumed run needs the same languages, so they are fingerprinted."""
        splits = super().prepare_splits(settings)
        languages = {name: read_column(rows, COLUMN) for name, rows in splits.named().items()}
        if unknown := set[str]().union(*languages.values()) - {*languages["train"]}:
            raise DataError(f"train lacks {', '.join(sorted(unknown))}, which dev or test has.")
        return with_fingerprints(splits, COLUMN)

    def prepare_labels(self, settings: Settings, splits: Splits) -> ClassLabels:
        """List the languages of the training set."""
        file = Path(settings["output_folder"]) / self.task.label_file
        return ensure_labels(file, read_column(splits.train, COLUMN))

    def make_collate(self, hparams: Settings, labels: ClassLabels) -> Callable[..., LanguageBatch]:
        return partial(collate, languages=labels, sample_rate=hparams["sample_rate"])

"""The training of `language_id.py`: its Brain and its data. Legend: B utterances, V languages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from language_id import COLUMN, LANGUAGE_FILE, LANGUAGE_IDENTIFICATION, LanguageModel
from speechbrain import Stage
from torch import Tensor

from recipes.prepare import COMMON_RANGES, corpus_of, prepare_audio, unlabeled_loaders
from sbkit.audio.augment import Augmentation
from sbkit.base.errors import DataError
from sbkit.data.batch import Batch, Loaders, collate_audio
from sbkit.data.splits import Splits, read_column
from sbkit.distributed.device import Placement
from sbkit.models.loss import Loss
from sbkit.text.vocabulary import ClassLabels, ensure_labels
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LanguageBatch(Batch):
    """Audio, and the language of each utterance."""

    ON_DEVICE = (*Batch.ON_DEVICE, "languages")
    languages: Tensor  # (B,)


class LanguageBrain(Brain):
    """Train the log-probability of the right language."""

    network: LanguageModel
    metrics = LANGUAGE_IDENTIFICATION.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names = ("compute_features", "CNN", "Transformer", "pooling", "language_lin")
        parts = {name: self.hparams.knobs[name] for name in names}
        self.network = LanguageModel(model=self.modules["model"], **parts)
        self.network.to(self.device)
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

    def score(self, log_probs: Tensor, batch: LanguageBatch) -> list[bool]:
        return [*(log_probs.argmax(1) == batch.languages).tolist()]


def prepare(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio; a resumed run needs the same languages, so they are fingerprinted."""
    splits = prepare_audio(knobs)
    languages = {name: read_column(rows, COLUMN) for name, rows in splits.named().items()}
    if unknown := set[str]().union(*languages.values()) - {*languages["train"]}:
        raise DataError(f"train lacks {', '.join(sorted(unknown))}, which dev or test has.")
    digest = sha256(str(languages).encode()).hexdigest()
    return replace(splits, fingerprints={**splits.fingerprints, COLUMN: digest})


def prepare_languages(knobs: Mapping[str, Any], splits: Splits) -> ClassLabels:
    """List the languages of the training set."""
    file = Path(knobs["output_folder"]) / LANGUAGE_FILE
    return ensure_labels(file, read_column(splits.train, COLUMN))


def load(
    hparams: Mapping[str, Any], splits: Splits, languages: ClassLabels, placement: Placement
) -> Loaders:
    """Plan batches with the languages of the column."""

    def collate(rows: Sequence[Mapping[str, Any]], *, sample_rate: int) -> LanguageBatch:
        fields = collate_audio(rows, sample_rate)
        ids = [languages.encode(row[COLUMN]) for row in rows]
        return LanguageBatch(**fields, languages=fields["audio_lengths"].new_tensor(ids))

    return unlabeled_loaders(hparams, splits, None, placement, collate)


LANGUAGE_ID = Recipe(
    task=LANGUAGE_IDENTIFICATION,
    prepare_splits=prepare,
    prepare_labels=prepare_languages,
    make_loaders=load,
    brain=LanguageBrain,
    corpus=corpus_of,
    ranges=COMMON_RANGES,
)

"""A user task: compress log-mel frames, without labels or text.

Nothing in sbkit refers to it. Legend: B utterances, S samples, T frames of 10 ms, M mel bins.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from speechbrain import Stage
from torch import Tensor, nn

from recipes.prepare import COMMON_RANGES, prepare_audio
from sbkit.audio.io import Samples
from sbkit.audio.lengths import length_mask
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.models.loss import Loss
from sbkit.models.parts import FeatureExtractor
from sbkit.tasks.task import Exportable, Scorer, Task
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe


class Autoencoder:
    """An autoencoder as one model."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: nn.Module,
        squeeze: nn.Module,
        stretch: nn.Module,
    ) -> None:
        self.model = model
        self.features = FeatureExtractor(compute_features)
        self.squeeze, self.stretch = squeeze, stretch

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Code log-mel frames and decode them: (B, S), (B,) -> (B, T, M), (B,)."""
        features, lengths = self.features(audio, audio_lengths)
        return self.decode(features), lengths

    def decode(self, features: Tensor) -> Tensor:
        return self.stretch(self.squeeze(features))


class Decoded(NamedTuple):
    """Features (B, T, M), their reconstruction (B, T, M), and their lengths (B,)."""

    features: Tensor
    decoded: Tensor
    lengths: Tensor

    def errors(self) -> Tensor:
        """Sum the squared errors of each utterance: (B,)."""
        squares = (self.features - self.decoded).square().mean(2)  # (B, T)
        return (squares * length_mask(self.lengths, squares.shape[1], squares.device)).sum(1)


def score_rows(
    bundle: Any, rows: Sequence[Mapping[str, Any]], clips: list[Samples], **_: Any
) -> list[tuple[float, int]]:
    """Return the squared error of the reconstruction of each clip, and its number of frames."""
    errors = []
    for clip in clips:
        decoded, lengths = bundle.predict([clip])
        audio = torch.from_numpy(clip.astype("float32")).unsqueeze(0)
        features, _ = bundle.model.network.features(audio, torch.tensor([len(clip)]))
        errors.append((float(Decoded(features, decoded, lengths).errors()), int(lengths)))
    return errors


def load(hparams: Mapping[str, Any], splits: Splits, labels: None, placement: Placement) -> Loaders:
    collate = partial(collate_clips, sample_rate=hparams["sample_rate"])
    return make_loaders(splits, hparams, collate=collate, placement=placement)


def collate_clips(rows: Sequence[Mapping[str, Any]], *, sample_rate: int) -> Batch:
    return Batch(**collate_audio(rows, sample_rate))


LOG_MEL_CODING = Task(
    name="tests.autoencoder.autoencoder.LOG_MEL_CODING",
    model_name="autoencoder of log-mel frames",
    export=Exportable(model_class="tests.autoencoder.autoencoder.Autoencoder"),
    scorer=Scorer(score=score_rows),
)


class AutoencoderBrain(Brain):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        parts = {key: self.hparams.knobs[key] for key in ("compute_features", "squeeze", "stretch")}
        parts["compute_features"].to(self.device)
        self.network = Autoencoder(model=self.modules["model"], **parts)

    def compute_forward(self, batch: Batch, stage: Stage) -> Decoded:
        features, lengths = self.network.features(batch.audio.float(), batch.audio_lengths)
        return Decoded(features, self.network.decode(features), lengths)

    def compute_objectives(self, outputs: Decoded, batch: Batch, stage: Stage) -> Loss:
        counts = outputs.lengths.to(batch.weights.device) * batch.weights
        return Loss(outputs.errors() * batch.weights, counts)


AUTOENCODER = Recipe(
    task=LOG_MEL_CODING,
    prepare_splits=prepare_audio,
    make_loaders=load,
    brain=AutoencoderBrain,
    ranges=COMMON_RANGES,
)

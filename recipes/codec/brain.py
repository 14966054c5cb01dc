"""Train a codec: audio to codes and back, by how far the spectra are apart.

Legend: B utterances, S samples, U frames of codes, G codebooks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from speechbrain import Stage
from torch import Tensor, nn

from recipes.codec import statistics
from recipes.codec.statistics import CodedUtterance
from sbkit.audio.augment import speed_perturb
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.data.batch import Batch
from sbkit.logs.metric import Metrics, as_words
from sbkit.models.codec import CodecModel
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import mel_distance, spectral_distance
from sbkit.tasks.codec import CODEC
from sbkit.train.brain import Brain

PARTS = ("compute_features", "encoder", "quantizer", "decoder")


class Decoded(NamedTuple):
    """Audio between -1 and 1, and what became of it: (B, S), zero past the lengths (B,)."""

    audio: Tensor
    lengths: Tensor
    decoded: Tensor
    codes: Tensor  # (B, U, G)
    frames: Tensor  # (B,)
    distance: Tensor  # (B,) of log-mel features, summed over frames


class CodecBrain(Brain):
    """Train features and spectra towards those of the audio, against a discriminator if wanted."""

    metrics: ClassVar[Metrics] = CODEC.metrics

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        parts = {name: getattr(self.hparams, name) for name in PARTS}
        self.codec = CodecModel(model=self.modules["model"], **parts)

    @property
    def inactive(self) -> tuple[nn.Module, ...]:
        """Return the discriminator where it has no weight."""
        return () if self.hparams.adversarial_weight else (self.hparams.discriminator,)

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        features = self.codec.features
        self.measure_features(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: Batch, stage: Stage) -> Decoded:
        """Code the audio, and decode it."""
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        audio = audio.float() / FULL_SCALE
        decoded, codes, frames = self.codec.forward(audio, lengths)
        decoded = decoded * length_mask(lengths, audio.shape[1], audio.device)
        distance = mel_distance(self.codec.features, decoded, audio, lengths)
        return Decoded(audio, lengths, decoded, codes, frames, distance)

    def compute_objectives(
        self, outputs: Decoded, batch: Batch, stage: Stage
    ) -> Loss | dict[str, Loss]:
        """Sum distances over samples, for the mean of a sample; with a discriminator, its, too."""
        knobs, audio, decoded = self.hparams, outputs.audio, outputs.decoded
        lengths = outputs.lengths.to(audio.device, non_blocking=True)
        sums = knobs.mel_weight * outputs.distance * self.codec.features.frame
        sums = sums + knobs.spectral_weight * spectral_distance(decoded, audio, lengths)
        counts = lengths * batch.weights
        if not knobs.adversarial_weight:
            return Loss(sums * batch.weights, counts)
        tell = knobs.discriminator
        sums = sums + knobs.adversarial_weight * lengths * tell(decoded, lengths, 1.0)
        told = tell(audio, lengths, 1.0) + tell(decoded.detach(), lengths, 0.0)
        made = Loss(sums * batch.weights, counts)
        return {"generator": made, "discriminator": Loss(told * batch.weights, batch.weights)}

    def score(self, outputs: Decoded, batch: Batch) -> list[CodedUtterance]:
        """Keep how far the features of each utterance are apart, and its codes."""
        space, codes = self.codec.quantizer.space, outputs.codes.cpu().numpy()
        rows = zip(
            outputs.distance.tolist(), codes, outputs.frames.tolist(), batch.ids, strict=True
        )
        return [
            CodedUtterance(distance / frames, space.check(row[:frames], of=name), space.size)
            for distance, row, frames, name in rows
        ]

    def measure(self, results: Sequence[CodedUtterance]) -> Mapping[str, float]:
        """Return the mel distance, and the figures of the codes."""
        return statistics.measure(results)

    def describe(self, results: Sequence[CodedUtterance]) -> str:
        """Write the figures over all codebooks."""
        values = statistics.measure(results)
        shown = {name: each for name, each in values.items() if not name[-1].isdecimal()}
        return ", ".join(as_words(self.metrics, shown))

    def report(
        self, split: str, results: Sequence[CodedUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write how often each code came, and its picture; return the figures."""
        return statistics.report(folder, split, results)

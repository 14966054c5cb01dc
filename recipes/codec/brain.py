"""Train a codec: audio to codes and back, by how far the spectra are apart.

Legend: B utterances, S samples, U frames of codes, G codebooks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from speechbrain import Stage
from torch import Tensor, nn

from recipes.codec import statistics
from recipes.codec.losses import mel_distance, spectral_distance
from recipes.codec.parts import CodecModel
from recipes.codec.statistics import CodedUtterance
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.data.batches.batch import Batch
from sbkit.distributed.ranks import rank
from sbkit.logs.log import log
from sbkit.logs.metric import Metrics
from sbkit.models.loss import Loss
from sbkit.train.brain import Brain
from sbkit.train.feature_statistics import measure_on_start

PARTS = ("compute_features", "encoder", "quantizer", "decoder", "discriminator")


class Decoded(NamedTuple):
    """Audio between -1 and 1, and what became of it: (B, S), zero past the lengths."""

    audio: Tensor
    decoded: Tensor
    codes: Tensor  # (B, U, G)
    distance: Tensor  # (B,) of log-mel features, summed over frames
    frames: Tensor  # (B,)


def code(codec: CodecModel, audio: Tensor, lengths: Tensor) -> Decoded:
    """Code and decode audio in the scale of int16: (B, S), (B,)."""
    audio = audio / FULL_SCALE
    decoded, codes, _ = codec.forward(audio, lengths)
    decoded = decoded * length_mask(lengths, audio.shape[1], audio.device)
    return Decoded(audio, decoded, codes, *mel_distance(codec.features, decoded, audio, lengths))


class CodecBrain(Brain):
    """Train features and spectra towards those of the audio, against a discriminator if wanted."""

    metrics: ClassVar[Metrics] = statistics.METRICS

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        parts: dict[str, Any] = {name: getattr(self.hparams, name, None) for name in PARTS}
        self.codec = CodecModel(model=self.modules["model"], **parts)
        self._dying: list[int] = []

    @property
    def inactive(self) -> tuple[nn.Module, ...]:
        """Return the discriminator where it has no weight."""
        found = self.codec.discriminator
        return () if found is None or self.hparams.adversarial_weight else (found,)

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        measure_on_start(self, self._features)

    def _features(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        features, frames = self.codec.features(audio / FULL_SCALE, lengths)
        mask = length_mask(frames, features.shape[1], features.device)
        return features * mask.unsqueeze(2), frames

    def compute_forward(self, batch: Batch, stage: Stage) -> Decoded:
        """Code the audio, and decode it."""
        return code(self.codec, batch.audio.float(), batch.audio_lengths)

    def compute_objectives(
        self, outputs: Decoded, batch: Batch, stage: Stage
    ) -> Loss | dict[str, Loss]:
        """Sum distances over samples, for the mean of a sample; with a discriminator, its, too."""
        knobs, audio, decoded = self.hparams, outputs.audio, outputs.decoded
        lengths = batch.audio_lengths.to(audio.device, non_blocking=True)
        sums = knobs.mel_weight * outputs.distance * self.codec.features.frame
        sums = sums + knobs.spectral_weight * spectral_distance(decoded, audio, lengths)
        counts = lengths * batch.weights
        discriminator = self.codec.discriminator
        if discriminator is None or not knobs.adversarial_weight:
            return Loss(sums * batch.weights, counts)
        sums = sums + knobs.adversarial_weight * lengths * discriminator(decoded, lengths, 1.0)
        told = discriminator(audio, lengths, 1.0) + discriminator(decoded.detach(), lengths, 0.0)
        made = Loss(sums * batch.weights, counts)
        return {"generator": made, "discriminator": Loss(told * batch.weights, batch.weights)}

    def score(self, outputs: Decoded, batch: Batch) -> list[CodedUtterance]:
        """Keep how far the features of each utterance are apart, and its codes."""
        space, codes = self.codec.quantizer.space, outputs.codes.cpu().numpy()
        distances, frames = outputs.distance.tolist(), outputs.frames.tolist()
        rows = zip(batch.ids, distances, codes, frames, strict=True)
        return [
            CodedUtterance(distance / count, space.check(row[:count], of=name), space)
            for name, distance, row, count in rows
        ]

    def measure(self, results: Sequence[CodedUtterance]) -> Mapping[str, float]:
        """Return the mel distance and the figures of the codes; note codebooks whose codes die."""
        values = statistics.measure(results)
        found = statistics.dying(results, values)
        if rank() == 0 and found and found != self._dying:
            used = ", ".join(f"{each} ({values[f'usage_{each}']:.0%} used)" for each in found)
            log(f"note: most codes are dead of codebook {used}. Try a lower lr or fewer levels.")
        self._dying = found
        return values

    def describe(self, results: Sequence[CodedUtterance]) -> str:
        """Write the figures over all codebooks."""
        return statistics.describe(results)

    def report(
        self, split: str, results: Sequence[CodedUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write how often each code came, and its picture; return the figures."""
        return statistics.report(folder, split, results)

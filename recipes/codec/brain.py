"""Train a codec, which turns audio into codes and back.

The loss compares the spectra of the decoded audio with those of the recording.

Legend: B utterances, S samples, U frames of codes, G codebooks.
"""

from speechbrain import Stage

from sbkit.audio.augment import speed_perturb
from sbkit.audio.io import FULL_SCALE
from sbkit.data.batch import Batch
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import spectral_distance
from sbkit.tasks.codec.model import CodecModel, CodedBatch
from sbkit.tasks.codec.task import CodecTask
from sbkit.train.brain import Brain

REAL = 1.0  # the discriminator's output for recorded audio
FAKE = 0.0  # its output for decoded audio


class CodecBrain(Brain):
    """Train on the distance of mel features and of spectra, optionally with a discriminator."""

    network: CodecModel
    parts = ("compute_features", "encoder", "quantizer", "decoder")
    metrics = CodecTask.metrics

    def init_optimizers(self) -> None:
        super().init_optimizers()
        if not self.hparams.adversarial_weight:
            self.hparams.discriminator.requires_grad_(False)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        features = self.network.compute_features
        self.measure_normalization(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: Batch, stage: Stage) -> CodedBatch:
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        return self.network.predict(audio.float(), lengths)

    def compute_objectives(
        self, outputs: CodedBatch, batch: Batch, stage: Stage
    ) -> Loss | dict[str, Loss]:
        """Return the codec's loss, as a sum over samples, and the discriminator's if there is one.

        Each frame's mel distance counts once for each of its samples.
        """
        settings = self.hparams
        audio = outputs.audio
        decoded = outputs.decoded
        lengths = outputs.lengths.to(audio.device, non_blocking=True)
        samples_per_frame = self.network.compute_features.frame_samples
        generator_loss = settings.mel_weight * outputs.mel_distance_sum * samples_per_frame
        spectral = spectral_distance(decoded, audio, lengths)
        generator_loss = generator_loss + settings.spectral_weight * spectral
        num_samples = lengths * batch.weights
        if not settings.adversarial_weight:
            return Loss(generator_loss * batch.weights, num_samples)
        discriminator = settings.discriminator
        adversarial = discriminator(decoded, lengths, REAL)
        generator_loss = generator_loss + settings.adversarial_weight * lengths * adversarial
        real_loss = discriminator(audio, lengths, REAL)
        discriminator_loss = real_loss + discriminator(decoded.detach(), lengths, FAKE)
        return {
            "generator": Loss(generator_loss * batch.weights, num_samples),
            "discriminator": Loss(discriminator_loss * batch.weights, batch.weights),
        }

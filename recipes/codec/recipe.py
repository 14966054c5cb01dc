"""Train a codec, which turns audio into codes and back, on any corpus.

The loss compares the spectra of the decoded audio with those of the recording.

Legend: B utterances, S samples, U frames of codes, G codebooks.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from speechbrain import Stage
from torch import Tensor, nn

from recipes.prepare import COMMON_RANGES, corpus_of, prepare_audio, unlabeled_loaders
from sbkit.audio.augment import speed_perturb
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.base.arrays import Counts
from sbkit.base.files import write_text_atomically
from sbkit.config.ranges import NON_NEGATIVE
from sbkit.data.batch import Batch
from sbkit.logs.curves import write_picture
from sbkit.logs.metric import Metrics, describe_values
from sbkit.models.code_space import Codes
from sbkit.models.codec import CodecModel
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import mel_distance, spectral_distance
from sbkit.tasks.codec import CODEC as TASK
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe

logger = logging.getLogger(__name__)

PARTS = ("compute_features", "encoder", "quantizer", "decoder")
SUMMARY = ("mel_distance", "usage", "perplexity", "entropy")  # metrics shown after a validation
REAL = 1.0  # the discriminator's score of recorded audio
FAKE = 0.0  # of decoded audio
# Below this share of the usage expected of equally likely codes, a note is logged.
MIN_USAGE_SHARE = 0.5


class CodedBatch(NamedTuple):
    """The outputs for a batch; audio is zero past the lengths."""

    audio: Tensor  # (B, S) between -1 and 1
    lengths: Tensor  # (B,)
    decoded: Tensor  # (B, S) from the codes
    codes: Tensor  # (B, U, G)
    num_frames: Tensor  # (B,)
    mel_distance_sum: Tensor  # (B,) over frames


class CodedUtterance(NamedTuple):
    """The codes of an utterance, and the error of the audio decoded from them."""

    mel_distance_per_frame: float
    codes: Codes
    codebook_size: int


class CodecBrain(Brain):
    """Train on the distance of mel features and of spectra, optionally with a discriminator."""

    metrics: ClassVar[Metrics] = TASK.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        parts = {name: getattr(self.hparams, name) for name in PARTS}
        self.codec = CodecModel(model=self.modules["model"], **parts)

    @property
    def unused_modules(self) -> tuple[nn.Module, ...]:
        """Return the discriminator if its weight is 0."""
        return () if self.hparams.adversarial_weight else (self.hparams.discriminator,)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        features = self.codec.features
        self.measure_normalization(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: Batch, stage: Stage) -> CodedBatch:
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        audio = audio.float() / FULL_SCALE
        decoded, codes, num_frames = self.codec.forward(audio, lengths)
        decoded = decoded * length_mask(lengths, audio.shape[1], audio.device)
        distance = mel_distance(self.codec.features, decoded, audio, lengths)
        return CodedBatch(audio, lengths, decoded, codes, num_frames, distance)

    def compute_objectives(
        self, outputs: CodedBatch, batch: Batch, stage: Stage
    ) -> Loss | dict[str, Loss]:
        """Return the codec's loss, as a sum over samples, and the discriminator's if there is one.

        Each frame's mel distance counts once for each of its samples.
        """
        knobs = self.hparams
        audio = outputs.audio
        decoded = outputs.decoded
        lengths = outputs.lengths.to(audio.device, non_blocking=True)
        samples_per_frame = self.codec.features.frame_samples
        generator_loss = knobs.mel_weight * outputs.mel_distance_sum * samples_per_frame
        spectral = spectral_distance(decoded, audio, lengths)
        generator_loss = generator_loss + knobs.spectral_weight * spectral
        num_samples = lengths * batch.weights
        if not knobs.adversarial_weight:
            return Loss(generator_loss * batch.weights, num_samples)
        discriminator = knobs.discriminator
        adversarial = discriminator(decoded, lengths, REAL)
        generator_loss = generator_loss + knobs.adversarial_weight * lengths * adversarial
        real_loss = discriminator(audio, lengths, REAL)
        discriminator_loss = real_loss + discriminator(decoded.detach(), lengths, FAKE)
        return {
            "generator": Loss(generator_loss * batch.weights, num_samples),
            "discriminator": Loss(discriminator_loss * batch.weights, batch.weights),
        }

    def score(self, outputs: CodedBatch, batch: Batch) -> list[CodedUtterance]:
        """Return the codes of each utterance, checked, and its mel distance per frame."""
        space = self.codec.quantizer.space
        distance_sums = outputs.mel_distance_sum.tolist()
        utterances = zip(
            batch.ids,
            outputs.codes.cpu().numpy(),
            outputs.num_frames.tolist(),
            distance_sums,
            strict=True,
        )
        return [
            CodedUtterance(
                mel_distance_per_frame=distance_sum / num_frames,
                codes=space.check(padded[:num_frames], subject=id),
                codebook_size=space.size,
            )
            for id, padded, num_frames, distance_sum in utterances
        ]

    def measure(self, results: Sequence[CodedUtterance]) -> Mapping[str, float]:
        """Return the mel distance per frame; usage, perplexity and entropy of the codes.

        Usage is the share of a codebook's codes that occur. Entropy (in bits) and perplexity are
        those of the frequencies of the codes. Each of the three is returned for each codebook, such
        as `usage_0`, and as the mean over the codebooks.
        """
        num_frames = [len(result.codes) for result in results]
        distances = [result.mel_distance_per_frame for result in results]
        counts = count_codes(results)
        shares = counts / counts.sum(1, keepdims=True)
        entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
        figures = {"usage": (counts > 0).mean(1), "perplexity": 2**entropy, "entropy": entropy}
        measured = {"mel_distance": float(np.average(distances, weights=num_frames))}
        for name, values in figures.items():
            measured[name] = float(values.mean())
        for name, values in figures.items():
            for codebook, value in enumerate(values):
                measured[f"{name}_{codebook}"] = float(value)
        return measured

    def describe(self, results: Sequence[CodedUtterance]) -> str:
        """Write the mel distance, and the means over all codebooks."""
        values = self.measure(results)
        return ", ".join(describe_values(self.metrics, {name: values[name] for name in SUMMARY}))

    def report(
        self, split: str, results: Sequence[CodedUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write the count of each code as `codes_SPLIT.tsv` and as a picture; return the metrics.

        Log a note for each codebook in which most codes do not occur.
        """
        values = self.measure(results)
        counts = count_codes(results)
        rows = [["code", *map(str, range(len(counts)))]]
        rows += [[str(code), *map(str, row)] for code, row in enumerate(counts.T.tolist())]
        table = "".join("\t".join(row) + "\n" for row in rows)
        write_text_atomically(folder / f"codes_{split}.tsv", table)
        write_picture(folder / f"codes_{split}.png", lambda: draw_codes(counts, values))
        codebook_size = counts.shape[1]
        num_draws = counts[0].sum()
        # A code of K equally likely ones is missing in n draws with probability (1 - 1/K)^n.
        expected_usage = 1 - (1 - 1 / codebook_size) ** num_draws
        for codebook in range(len(counts)):
            usage = values[f"usage_{codebook}"]
            if usage < MIN_USAGE_SHARE * expected_usage:
                logger.info(
                    f"note: most codes of codebook {codebook} are dead in {split} ({usage:.0%} "
                    "occur). Try a lower lr or fewer levels."
                )
        return values


def count_codes(results: Sequence[CodedUtterance]) -> Counts:
    """Count the occurrences of each codebook's codes: -> (G, codebook_size)."""
    codes = np.concatenate([result.codes for result in results])
    size = results[0].codebook_size
    return np.stack([np.bincount(column, minlength=size) for column in codes.T])


def draw_codes(counts: Counts, values: Mapping[str, float]) -> bytes:
    """Draw the occurrences of each codebook's codes, the most frequent first, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for codebook, occurrences in enumerate(counts):
        usage = values[f"usage_{codebook}"]
        perplexity = values[f"perplexity_{codebook}"]
        label = f"codebook {codebook}: {usage:.0%} used, perplexity {perplexity:.0f}"
        axes.plot(np.sort(occurrences)[::-1], label=label)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="codes, by frequency", ylabel="frames", ylim=(0, None))
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


LOSS_WEIGHTS = ("mel_weight", "spectral_weight", "adversarial_weight")
CODEC = Recipe(
    task=TASK,
    prepare_splits=prepare_audio,
    make_loaders=unlabeled_loaders,
    brain=CodecBrain,
    corpus=corpus_of,
    ranges=COMMON_RANGES | dict.fromkeys(LOSS_WEIGHTS, NON_NEGATIVE),
)

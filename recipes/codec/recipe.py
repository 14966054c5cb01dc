"""A codec: audio to codes and back, trained on any corpus by the distance of spectra.

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
MIN_USAGE_SHARE = 0.5  # of the codes that as many equally likely draws would reach


class CodedBatch(NamedTuple):
    """The outputs for a batch; audio is zero past the lengths."""

    audio: Tensor  # (B, S) between -1 and 1
    lengths: Tensor  # (B,)
    decoded: Tensor  # (B, S) from the codes
    codes: Tensor  # (B, U, G)
    frames: Tensor  # (B,)
    distance: Tensor  # (B,) of log-mel features, summed over frames


class CodedUtterance(NamedTuple):
    """The codes of an utterance and their error."""

    distance: float  # of log-mel features, mean over frames
    codes: Codes
    size: int  # of a codebook


class CodecBrain(Brain):
    """Train by the distance of features and spectra, optionally with a discriminator."""

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
        self.measure_features(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: Batch, stage: Stage) -> CodedBatch:
        audio, lengths = speed_perturb(batch.audio, batch.audio_lengths, batch.speed_groups)
        audio = audio.float() / FULL_SCALE
        decoded, codes, frames = self.codec.forward(audio, lengths)
        decoded = decoded * length_mask(lengths, audio.shape[1], audio.device)
        distance = mel_distance(self.codec.features, decoded, audio, lengths)
        return CodedBatch(audio, lengths, decoded, codes, frames, distance)

    def compute_objectives(
        self, outputs: CodedBatch, batch: Batch, stage: Stage
    ) -> Loss | dict[str, Loss]:
        """Sum the losses over samples, for the mean per sample; add the discriminator's own."""
        knobs, audio, decoded = self.hparams, outputs.audio, outputs.decoded
        lengths = outputs.lengths.to(audio.device, non_blocking=True)
        sums = knobs.mel_weight * outputs.distance * self.codec.features.frame
        sums = sums + knobs.spectral_weight * spectral_distance(decoded, audio, lengths)
        counts = lengths * batch.weights
        if not knobs.adversarial_weight:
            return Loss(sums * batch.weights, counts)
        discriminator = knobs.discriminator
        sums = sums + knobs.adversarial_weight * lengths * discriminator(decoded, lengths, 1.0)
        recorded_error = discriminator(audio, lengths, 1.0)
        errors = recorded_error + discriminator(decoded.detach(), lengths, 0.0)
        return {
            "generator": Loss(sums * batch.weights, counts),
            "discriminator": Loss(errors * batch.weights, batch.weights),
        }

    def score(self, outputs: CodedBatch, batch: Batch) -> list[CodedUtterance]:
        """Keep the distance of each utterance's features, and its codes."""
        space, codes = self.codec.quantizer.space, outputs.codes.cpu().numpy()
        utterances = zip(
            outputs.distance.tolist(), codes, outputs.frames.tolist(), batch.ids, strict=True
        )
        return [
            CodedUtterance(distance / frames, space.check(padded[:frames], subject=id), space.size)
            for distance, padded, frames, id in utterances
        ]

    def measure(self, results: Sequence[CodedUtterance]) -> Mapping[str, float]:
        """Return the mel distance per frame, and figures of the codes: means, and per codebook.

        Usage is the share of codes that occur; entropy (in bits) and perplexity are those of their
        frequencies.
        """
        frames = [len(result.codes) for result in results]
        distance = float(np.average([result.distance for result in results], weights=frames))
        counts = count_codes(results)
        shares = counts / counts.sum(1, keepdims=True)
        entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
        figures = {"usage": (counts > 0).mean(1), "perplexity": 2**entropy, "entropy": entropy}
        means = {name: float(values.mean()) for name, values in figures.items()}
        per_codebook = {
            f"{name}_{codebook}": float(value)
            for name, values in figures.items()
            for codebook, value in enumerate(values)
        }
        return {"mel_distance": distance, **means, **per_codebook}

    def describe(self, results: Sequence[CodedUtterance]) -> str:
        """Write the means over all codebooks."""
        values = self.measure(results)
        means = {name: value for name, value in values.items() if not name[-1].isdecimal()}
        return ", ".join(describe_values(self.metrics, means))

    def report(
        self, split: str, results: Sequence[CodedUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Write `codes_SPLIT.tsv`, the count of each code, and its picture; return the figures.

        Log a note for each codebook with mostly dead codes.
        """
        values, counts = self.measure(results), count_codes(results)
        rows = [["code", *map(str, range(len(counts)))]]
        rows += [[str(code), *map(str, row)] for code, row in enumerate(counts.T.tolist())]
        table = "".join("\t".join(row) + "\n" for row in rows)
        write_text_atomically(folder / f"codes_{split}.tsv", table)
        write_picture(folder / f"codes_{split}.png", lambda: draw_codes(counts, values))
        reachable = 1 - (1 - 1 / counts.shape[1]) ** counts[0].sum()
        for codebook in range(len(counts)):
            if (usage := values[f"usage_{codebook}"]) < MIN_USAGE_SHARE * reachable:
                logger.info(
                    f"note: most codes of codebook {codebook} are dead in {split} ({usage:.0%} "
                    "occur). Try a lower lr or fewer levels."
                )
        return values


def count_codes(results: Sequence[CodedUtterance]) -> Counts:
    """Count the occurrences of each codebook's codes: -> (G, size)."""
    codes = np.concatenate([result.codes for result in results])
    return np.stack([np.bincount(column, minlength=results[0].size) for column in codes.T])


def draw_codes(counts: Counts, values: Mapping[str, float]) -> bytes:
    """Draw the occurrences of each codebook's codes, the most frequent first, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for codebook, occurrences in enumerate(counts):
        usage, perplexity = values[f"usage_{codebook}"], values[f"perplexity_{codebook}"]
        label = f"codebook {codebook}: {usage:.0%} used, perplexity {perplexity:.0f}"
        axes.plot(np.sort(occurrences)[::-1], label=label)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="codes, by frequency", ylabel="frames", ylim=(0, None))
    axes.legend()
    figure.savefig(png := io.BytesIO(), format="png", dpi=120)
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

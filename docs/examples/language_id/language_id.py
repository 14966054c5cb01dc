"""The language of an utterance: model and task. B utterances, S samples, U frames, V languages."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sbkit.audio.augment import AugmentFeatures
from sbkit.audio.io import stream_audio
from sbkit.audio.lengths import length_mask
from sbkit.audio.segments import Segmenter
from sbkit.bundle.task import Task
from sbkit.logs.metric import Metric, Metrics
from sbkit.models.encoder import AcousticModel, make_encoder
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.vocabulary import ClassLabels

COLUMN = "language"  # of the tables


class LanguageModel(AcousticModel):
    """Score each language for each utterance: encoder -> pooling -> language_lin."""

    def __init__(
        self, *, model: nn.ModuleList, pooling: nn.Module, language_lin: nn.Module, **parts: Any
    ) -> None:
        heads = {"pooling": pooling, "language_lin": language_lin}
        super().__init__(model=model, encoder=make_encoder(parts), heads=heads)
        self.pooling = pooling
        self.language_lin = language_lin

    def predict(
        self, audio: Tensor, audio_lengths: Tensor, spec_augment: AugmentFeatures | None = None
    ) -> Tensor:
        """Compute log-probabilities in float32: (B, S), (B,) -> (B, V)."""
        inputs = self.encoder.inputs(audio, audio_lengths, spec_augment)
        scores: Tensor = self.language_lin(self.pooling(*self.encoder.backbone(*inputs)))
        return scores.float().log_softmax(-1)


class AttentivePooling(nn.Module):
    """Return mean and deviation, weighted by attention: (B, U, D), (B,) -> (B, 2D)."""

    def __init__(self, *, d_model: int) -> None:
        super().__init__()
        self.attention = nn.Linear(d_model, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = length_mask(lengths, x.shape[1], x.device).unsqueeze(-1)  # (B, U, 1), true within
        # A finite score, because an utterance may have no frames.
        weights = self.attention(x).float().masked_fill(~mask, -1e9).softmax(1)
        x = x.float().masked_fill(~mask, 0.0)
        mean = (weights * x).sum(1)
        variance = (weights * (x - mean.unsqueeze(1)).square()).sum(1)
        return torch.cat([mean, variance.clamp(min=1e-5).sqrt()], dim=-1)


def identify(options: Namespace) -> None:
    """Print the most probable language of each file, and its probability."""
    parser = ArgumentParser(prog="identify")
    parser.add_argument("files", nargs="+")
    bundle = load_bundle(options.bundle, user_modules=options.user_modules)
    rate = bundle.config.sample_rate
    for file in parser.parse_args(options.arguments).files:
        clips = (segment.samples for segment in Segmenter(rate).split(stream_audio(file, rate)))
        total = sum(len(clip) * bundle.predict([clip])[0].exp() for clip in clips)  # (V,)
        probability, index = (total / total.sum()).max(0)
        print(f"{file}\t{bundle.labels.names[index]}\t{probability:.4f}")


class LanguageIdentification(Task):
    """Which language an utterance is in."""

    model_name = "language identifier"
    metrics: ClassVar[Metrics] = {"accuracy": Metric(lower_is_better=False)}
    label_file = "languages.txt"  # in the run folder and in the bundle
    label_key = "languages"
    heads = ("language_lin",)
    uses = ("run FOLDER identify talk.wav",)

    def model_class(self) -> type[LanguageModel]:
        return LanguageModel

    def commands(self) -> Mapping[str, Callable[[Namespace], None]]:
        return {"identify": identify}

    def measure(self, results: Sequence[bool]) -> Mapping[str, float]:
        return {"accuracy": sum(results) / len(results)}

    def read_outputs(self, outputs: Tensor, labels: ClassLabels) -> list[str]:
        """Return the most probable language of each clip, from its log-probabilities (B, V)."""
        return [labels.names[index] for index in outputs.argmax(1).tolist()]

    def result(self, prediction: str, row: Mapping[str, Any], **_: Any) -> bool:
        """Return whether the language is the right one."""
        return bool(prediction == row[COLUMN])

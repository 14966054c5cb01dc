"""Encoders that transformers runs, each with the feature extractor of its folder.

Legend: B utterances, S samples, T features, U frames of the encoder, M values of a
feature, D width.

Only the classes of the table are built, from sizes and rates; code beside a model is never run.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling, length_mask
from sbkit.base.arrays import Float32s
from sbkit.base.errors import BundleError
from sbkit.base.imports import require_package
from sbkit.base.torch_internals import batch_norms
from sbkit.models.pretrained.blocks import Config

MIN_SAMPLES = 1600  # in the input of an extractor, which needs a whole window
OWN_MASKS = ("mask_time_prob", "mask_feature_prob")  # `PretrainedEncoder` masks in their place


class Classes(NamedTuple):
    """Names of classes of transformers, and of the encoder's module that projects features."""

    encoder: str
    extractor: str
    projection: str


CLASSES = {  # keyed by the `model_type` of a `config.json`
    "wav2vec2-bert": Classes(
        encoder="Wav2Vec2BertModel",
        extractor="SeamlessM4TFeatureExtractor",
        projection="feature_projection",
    ),
    "parakeet_encoder": Classes(
        encoder="ParakeetEncoder",
        extractor="ParakeetFeatureExtractor",
        projection="subsampling",
    ),
}


class ExtractedFeatures(nn.Module):
    """Compute features by the extractor, on the CPU: (B, S) in +-1, (B,) -> (B, T, M), (B,)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model_type: str = config["model_type"]
        make_extractor = _find_class(config, "extractor")
        self.extractor = make_extractor(**_pick(config, signature(make_extractor).parameters))

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_exporting():
            raise BundleError(
                f"An encoder of type {self.model_type} cannot be written as ONNX, because "
                "transformers computes its features with NumPy."
            )
        clips = [
            np.pad(samples[:length], (0, max(0, MIN_SAMPLES - length)))
            for samples, length in zip(audio.cpu().numpy(), lengths.tolist(), strict=True)
        ]
        features, _ = self._extract(clips)
        num_frames = self.subsampling.count(torch.tensor(audio.shape[1])).clamp(min=1)
        return features[:, :num_frames].to(audio.device), self.subsampling.count(lengths)

    @cached_property
    def subsampling(self) -> Subsampling:
        def count(samples: int) -> int:
            return self._extract([np.zeros(samples, np.float32)])[1]

        return measure_subsampling(count, start=2 * MIN_SAMPLES)

    def _extract(self, clips: Sequence[Float32s]) -> tuple[Tensor, int]:
        """Return the features of clips, and the number of their frames together."""
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        inputs = self.extractor(clips, **options)
        return inputs["input_features"], int(inputs["attention_mask"].sum())


def measure_subsampling(count: Callable[[int], int], *, start: int) -> Subsampling:
    """Measure a subsampling by a function that counts the frames of a number of inputs.

    start: a number of inputs that is at least the stride.
    """
    frames = count(start) + 1
    lengths = range(3 * start)
    first, second = (bisect_left(lengths, n, lo=start, key=count) for n in (frames, frames + 1))
    stride = second - first
    return Subsampling(stride, frames * stride - first)


def complete_settings(settings: Config) -> dict[str, Any]:
    """Pick the settings of an encoder and its extractor, and add their defaults."""
    config_class = _find_class(settings, "encoder").config_class
    names = _setting_names(config_class)
    encoder = make_config(config_class, settings).to_json_string(use_diff=False)
    parameters = signature(_find_class(settings, "extractor")).parameters.values()
    extractor = {
        p.name: settings.get(p.name, p.default) for p in parameters if p.default is not p.empty
    }
    rate = extractor["sampling_rate"]
    return {**_pick(json.loads(encoder), names), **extractor, "sample_rate": rate}


def make_body(config: Config) -> Any:
    """Make an encoder of transformers with random weights."""
    encoder_class = _find_class(config, "encoder")
    own = {**config, "dropout": config["hidden_dropout"], **dict.fromkeys(OWN_MASKS, 0.0)}
    return encoder_class(make_config(encoder_class.config_class, own))


def make_config(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """Make a configuration of transformers from the sizes and rates of a file.

    The settings that all models have are left out: some make transformers load other code, such as
    `attn_implementation`, or other files, such as `transformers_weights`.
    """
    picked = _pick(settings, _setting_names(config_class))
    for name, inner_class in config_class.sub_configs.items():
        if isinstance(inner := picked.get(name), Mapping):
            picked[name] = make_config(inner_class, inner)
    return config_class(**picked)


def subsampling_of(body: Any) -> Subsampling:
    """Return how an encoder of transformers subsamples features."""
    # Private; seen in transformers 5.23.
    count: Any = getattr(body, "_get_subsampling_output_length", None)
    count = count or body._get_feat_extract_output_lengths
    return measure_subsampling(lambda n: int(count(torch.tensor([n], device="cpu"))), start=100)


def run_body(
    body: Any, x: Tensor, lengths: Tensor, mask: Callable[[Tensor], Tensor], middle: int | None
) -> tuple[Tensor, Any]:
    """Return the final states, and those after the layer ``middle``: (B, T, M), (B,) -> (B, U, D).

    mask: is called with the projected features.
    """

    def change_projected(_: nn.Module, inputs: object, output: Any) -> Any:
        return (mask(output[0]), *output[1:]) if isinstance(output, tuple) else mask(output)

    for norm in batch_norms(body):
        norm.eval()  # with a batch's own statistics, an utterance would depend on its batch
    within = length_mask(lengths.clamp(min=1), x.shape[1], x.device)
    projection = getattr(body, CLASSES[body.config.model_type].projection)
    with projection.register_forward_hook(change_projected):
        output = body(x, attention_mask=within, output_hidden_states=middle is not None)
    if middle is None:
        return output.last_hidden_state, None
    # Without the layers that LayerDrop skipped, which may be all
    states = output.hidden_states or (output.last_hidden_state,)
    return output.last_hidden_state, states[min(middle, len(states) - 1)]


def _find_class(config: Config, kind: str) -> Any:
    """Return the class of transformers that the table names."""
    name = getattr(CLASSES[config["model_type"]], kind)
    return getattr(require_package("transformers", extra="export"), name)


def _setting_names(config_class: Any) -> list[str]:
    """Return the names of sizes and rates, without those that all models of transformers have."""
    shared = {field.name for field in fields(config_class.__base__)}
    return [field.name for field in fields(config_class) if field.name not in shared]


def _pick(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: config[name] for name in names if name in config}

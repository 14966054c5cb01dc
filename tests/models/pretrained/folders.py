"""Folders of tiny pretrained models as `save_pretrained` writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbkit.audio.io import FULL_SCALE
from sbkit.base.torch_internals import batch_norms
from sbkit.models.pretrained.encoder import (
    PretrainedEncoder,
    PretrainedFeatures,
    PretrainedFrontEnd,
)
from sbkit.models.pretrained.folder import complete_config

SIZES = {"hidden_size": 24, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "intermediate_size": 32}
WAVEFORMS = {
    **SIZES,
    **{"conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 2], "conv_stride": [5, 4, 2]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
# All other keys have defaults, which are Hugging Face's as well as sbkit's.
CONFIGS: dict[str, dict[str, Any]] = {
    "wav2vec2": WAVEFORMS,
    "hubert": WAVEFORMS,
    "wavlm": {**WAVEFORMS, "num_buckets": 32, "max_bucket_distance": 80},
    "wav2vec2-bert": {
        **SIZES,
        **{"feature_projection_input_dim": 40, "conv_depthwise_kernel_size": 5},
        **{"left_max_position_embeddings": 12, "right_max_position_embeddings": 3},
    },
    "parakeet_encoder": {**SIZES, "conv_kernel_size": 5, "subsampling_conv_channels": 8},
    "whisper": {
        **{"d_model": 24, "encoder_layers": 3, "encoder_attention_heads": 4},
        **{"encoder_ffn_dim": 32, "num_mel_bins": 20, "max_source_positions": 150},  # 3 s
    },
}
# Frames of 20 ms, like those of large models, so that a run is quick.
FRAMES = {"conv_dim": [16] * 3, "conv_kernel": [20, 8, 8], "conv_stride": [10, 8, 4]}
PREPROCESSOR = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16_000}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "wav2vec2-bert": {
        **{"feature_extractor_type": "SeamlessM4TFeatureExtractor", "sampling_rate": 16_000},
        **{"feature_size": 20, "num_mel_bins": 20, "padding_value": 1},
    },
    "parakeet_encoder": PREPROCESSOR | {"feature_extractor_type": "ParakeetFeatureExtractor"},
    "whisper": {
        **{"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16_000},
        **{"feature_size": 20, "n_fft": 400, "hop_length": 160},
    },
}


def tiny_config(model_type: str = "wav2vec2", **config: Any) -> dict[str, Any]:
    """Return `encoder_config` of the folder that `make_folder` makes from the same arguments."""
    settings = {**CONFIGS[model_type], **PREPROCESSORS.get(model_type, {}), **config}
    return complete_config({**settings, "model_type": model_type}, source_file="a test")


def make_parts(
    config: dict[str, Any], **options: Any
) -> tuple[PretrainedFrontEnd, PretrainedEncoder]:
    """Make front-end and encoder with random weights, including those that start as 0 or 1."""
    torch.manual_seed(0)
    front_end = PretrainedFrontEnd(config=config)
    encoder = PretrainedEncoder(config=config, **options)
    for part in (front_end, encoder):
        for parameter in part.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        for norm in batch_norms(part):
            for statistic in (norm.running_mean, norm.running_var):
                assert statistic is not None
                statistic += torch.rand(statistic.shape)
    return front_end.eval(), encoder.eval()


def encode(config: dict[str, Any], parts: Any, audio: Tensor, *lengths: int) -> Tensor:
    """Compute features and states of audio: (B, S), lengths -> (B, U, D)."""
    extract = PretrainedFeatures(config=config)
    features, frames = extract(FULL_SCALE * audio, torch.tensor(lengths))
    x, frames = parts[0](features, frames)
    return parts[1](x, frames)[0]


def make_folder(path: Path, model_type: str = "wav2vec2", **config: Any) -> Path:
    """Write config.json, model.safetensors and preprocessor_config.json of a tiny random model."""
    path.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIGS[model_type], "model_type": model_type, **config}
    (path / "config.json").write_text(json.dumps(settings))
    preprocessor = PREPROCESSORS.get(model_type, PREPROCESSOR)
    if model_type == "whisper":
        preprocessor = {**preprocessor, "chunk_length": settings["max_source_positions"] // 50}
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    front_end, encoder = make_parts(tiny_config(model_type, **config))
    tensors = {
        prefix + name.removeprefix("body."): tensor.contiguous()
        for part, prefix in ((front_end, front_end.prefix), (encoder, ""))
        for name, tensor in part.state_dict().items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def split_into_shards(folder: Path) -> None:
    """Write the tensors like `save_pretrained` with a small max_shard_size."""
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for file in {*files.values()}:
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

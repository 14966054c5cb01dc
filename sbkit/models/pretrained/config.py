"""The configuration of a pretrained encoder: its `config.json`, completed with defaults.

Keys and defaults are Hugging Face's (transformers 5.23, `models/*/configuration_*.py`); only keys
that the modules of this folder read are kept. In addition:

    do_normalize   whether the model was trained on clips of zero mean and unit variance
    sample_rate    Hz
    source         name, license and SHA-256 of the weights of the base model; null: random weights
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import read_regular
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.document import did_you_mean
from sbkit.config.ranges import NOT_NEGATIVE, Range
from sbkit.models.pretrained.folder import (
    CONFIG,
    MAX_FILE_BYTES,
    SNAPSHOTS,
    file_in,
    find_folder,
    hash_weights,
    home_of,
    read_json,
)

Config = dict[str, Any]


def _sizes(hidden: int, layers: int, heads: int, intermediate: int) -> Config:
    return {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"intermediate_size": intermediate, "sample_rate": SAMPLE_RATE, "do_normalize": True},
    }


WAV2VEC2: Config = {
    **_sizes(768, 12, 12, 3072),
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-5, "do_stable_layer_norm": False},
    **{"feat_extract_norm": "group", "feat_extract_activation": "gelu", "conv_bias": False},
    **{"conv_dim": [512] * 7, "conv_stride": [5, 2, 2, 2, 2, 2, 2]},
    **{"conv_kernel": [10, 3, 3, 3, 3, 2, 2], "num_conv_pos_embeddings": 128},
    "num_conv_pos_embedding_groups": 16,
}
W2V_BERT: Config = {
    **_sizes(1024, 24, 16, 4096),
    **{"hidden_act": "swish", "layer_norm_eps": 1e-5, "conv_depthwise_kernel_size": 31},
    **{"feature_projection_input_dim": 160, "num_mel_bins": 80, "stride": 2},
    **{"left_max_position_embeddings": 64, "right_max_position_embeddings": 8},
    "position_embeddings_type": "relative_key",
}
PARAKEET: Config = {
    **_sizes(1024, 24, 8, 4096),
    **{"hidden_act": "silu", "attention_bias": True, "convolution_bias": True},
    **{"scale_input": True, "conv_kernel_size": 9, "subsampling_factor": 8},
    **{"subsampling_conv_channels": 256, "subsampling_conv_kernel_size": 3},
    **{"subsampling_conv_stride": 2, "num_mel_bins": 80, "n_fft": 512, "win_length": 400},
    **{"hop_length": 160, "preemphasis": 0.97},
}
DEFAULTS: dict[str, Config] = {  # by model_type
    "wav2vec2": WAV2VEC2,
    "hubert": {**WAV2VEC2, "feat_proj_layer_norm": True},
    "wavlm": {**WAV2VEC2, "num_buckets": 320, "max_bucket_distance": 800},
    "wav2vec2-bert": W2V_BERT,
    "parakeet_encoder": PARAKEET,
}
UNSUPPORTED = {  # unless false or null
    "auto_map": "null, since code of the model's author is never run",
    "add_adapter": "false",
    "adapter_attn_dim": "null",
    "conv_pos_batch_norm": "false",
}
CHOICES = {
    "hidden_act": ("gelu", "relu", "silu", "swish"),
    "feat_extract_activation": ("gelu", "relu", "silu", "swish"),
    "feat_extract_norm": ("group", "layer"),
    "position_embeddings_type": ("relative_key",),
}
SIZE = Range(low=1, high=1 << 16, whole=True, advice="Use another model.")
DIVISORS = ("num_attention_heads", "num_conv_pos_embedding_groups")  # of hidden_size
PREPROCESSOR, PROCESSOR, CARD = "preprocessor_config.json", "processor_config.json", "README.md"


def read_encoder_config(path_or_id: str | Path) -> Config:
    """Read the configuration of an encoder from a folder, or from the hub's cache by its id.

    Raises:
        ConfigError: the family, the architecture or a size is not supported.
        BundleError: a file of the folder is missing or damaged.
    """
    folder = find_folder(str(path_or_id))
    settings = read_json(folder, CONFIG)
    if settings is None:
        raise BundleError(
            f"`pretrained` must be a folder with {CONFIG}, but {folder} has none. Pass a folder "
            "written by save_pretrained or a download."
        )
    encoder_settings = settings.get("encoder_config") or {}  # of a model with a head
    settings = {**settings, **encoder_settings, **_feature_settings(folder)}
    config = complete_config(settings, source_file=str(folder / CONFIG))
    name = folder.resolve().name
    if folder.parent.name == SNAPSHOTS:
        name = home_of(folder).name.removeprefix("models--").replace("--", "/")
    source = {"name": name, "license": _read_license(folder), "sha256": hash_weights(folder)}
    return config | {"source": source}


def complete_config(settings: Mapping[str, Any], *, source_file: str) -> Config:
    """Keep the settings that a family's modules read, and add defaults; check all values.

    Raises:
        ConfigError: a value is not supported; the message names ``source_file``.
    """
    family = settings.get("model_type")
    if family not in DEFAULTS:
        raise ConfigError(
            f"`model_type` in {source_file} must be {', '.join(DEFAULTS)}, but is {family}."
            f"{did_you_mean(str(family), DEFAULTS)} Use a model of one of these families."
        )
    config = {key: settings.get(key, default) for key, default in DEFAULTS[family].items()}
    for key, requirement in _faults({**settings, **config}, DEFAULTS[family]):
        raise ConfigError(
            f"`{key}` in {source_file} must be {requirement}, but is "
            f"{config.get(key, settings.get(key))}. Correct it, or use another model."
        )
    return {"model_type": family, **config, "source": settings.get("source")}


def _faults(settings: Mapping[str, Any], defaults: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys of invalid values, and the requirement of each."""
    yield from ((key, requirement) for key, requirement in UNSUPPORTED.items() if settings.get(key))
    for key, default in defaults.items():
        requirement, is_met = _requirement(key, default, settings[key])
        if not is_met:
            yield key, requirement
    for key in DIVISORS:
        if settings["hidden_size"] % settings.get(key, 1):
            yield "hidden_size", f"a multiple of `{key}` ({settings[key]})"
    for key in ("conv_kernel", "conv_stride"):
        if len(settings.get(key, ())) != (count := len(settings.get("conv_dim", ()))):
            yield key, f"a list as long as `conv_dim` ({count})"
    if "feature_projection_input_dim" in defaults:
        stacked = settings["num_mel_bins"] * settings["stride"]
        if settings["feature_projection_input_dim"] != stacked:
            requirement = f"`num_mel_bins` times `stride` of {PREPROCESSOR}, {stacked}"
            yield "feature_projection_input_dim", requirement


def _requirement(key: str, default: object, value: object) -> tuple[str, bool]:
    """Return the requirement of a value, from its key or default, and whether it is met."""
    if key in CHOICES:
        return " or ".join(CHOICES[key]), value in CHOICES[key]
    if isinstance(default, bool):
        return "true or false", isinstance(value, bool)
    if isinstance(default, list):
        is_met = isinstance(value, list) and bool(value) and all(size in SIZE for size in value)
        return f"a list, each {SIZE}", is_met
    allowed = SIZE if isinstance(default, int) else NOT_NEGATIVE
    return str(allowed), value in allowed


def _feature_settings(folder: Path) -> Config:
    """Read the settings of the features, which transformers 5 writes into the processor's file."""
    processor = read_json(folder, PROCESSOR) or {}
    settings = read_json(folder, PREPROCESSOR) or processor.get("feature_extractor") or {}
    if "sampling_rate" not in settings:
        raise BundleError(
            f"{folder} has no {PREPROCESSOR} with a sampling_rate. Download it, or save the "
            "feature extractor of the model into the folder."
        )
    return {**settings, "sample_rate": settings["sampling_rate"]}


def _read_license(folder: Path) -> str:
    """Find the license in the front matter of the model card."""
    if (file := file_in(folder, CARD)) is None:
        return "unknown"
    card = read_regular(file, max_bytes=MAX_FILE_BYTES, subject="A model card")
    front_matter = r"---\s*\n(?:(?!---).*\n)*?license:\s*(\S+)"
    match = re.match(front_matter, card.decode(errors="replace"))
    return match[1].strip("'\"") if match else "unknown"

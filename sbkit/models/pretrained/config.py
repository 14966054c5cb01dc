"""The sizes of a pretrained encoder: what `config.json` says, with the defaults that it leaves out.

The keys and their defaults are Hugging Face's (transformers 5.23, `models/*/configuration_*.py`);
only those that the modules of this folder read are kept. Beside them:

    do_normalize   whether the model was trained on clips of zero mean and unit variance
    sample_rate    Hz
    source         name, licence and SHA-256 of the weights of the base model; null: from nothing
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.base.text import listed
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.document import did_you_mean
from sbkit.config.ranges import NOT_NEGATIVE, Range
from sbkit.models.pretrained.folder import (
    CARD,
    CONFIG,
    LARGEST,
    file_in,
    find_folder,
    hash_weights,
    name_of,
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
FAMILIES: dict[str, Config] = {  # by model_type
    "wav2vec2": WAV2VEC2,
    "hubert": {**WAV2VEC2, "feat_proj_layer_norm": True},
    "wavlm": {**WAV2VEC2, "num_buckets": 320, "max_bucket_distance": 800},
    "wav2vec2-bert": W2V_BERT,
    "parakeet_encoder": PARAKEET,
}
UNSUPPORTED = ("add_adapter", "adapter_attn_dim", "conv_pos_batch_norm")  # unless false or null
WORDS = {
    "hidden_act": ("gelu", "relu", "silu", "swish"),
    "feat_extract_activation": ("gelu", "relu", "silu", "swish"),
    "feat_extract_norm": ("group", "layer"),
    "position_embeddings_type": ("relative_key",),
}
SIZE = Range(low=1, high=1 << 16, whole=True, advice="Take another model.")
MULTIPLE = ("num_attention_heads", "num_conv_pos_embedding_groups")  # hidden_size is one of each
PARALLEL = ("conv_dim", "conv_stride", "conv_kernel")
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
UNKNOWN = "unknown"


def read_encoder_config(named: str | Path) -> Config:
    """Read what a folder, or the id of a model in the hub's cache, says of an encoder.

    Raises SbkitError for another family, an architecture that is not supported, sizes that cannot
    be, and what the folder lacks.
    """
    folder = find_folder(str(named))
    whole = read_json(folder, CONFIG)
    if whole is None:
        raise SbkitError(
            f"`pretrained` must be a folder with {CONFIG}, but {folder} has none. Name the folder "
            "that save_pretrained or a download left."
        )
    if "auto_map" in whole:
        raise SbkitError(
            f"{folder / CONFIG} must describe a model of transformers' own, but its `auto_map` "
            "asks for code of its author, which is not run. Take another model."
        )
    inner = whole.get("encoder_config")
    settings = inner if isinstance(inner, Mapping) else whole
    config = complete_config({**settings, **_audio(folder)}, of=str(folder / CONFIG))
    source = {"name": name_of(folder), "licence": _licence(folder), "sha256": hash_weights(folder)}
    return config | {"source": source}


def complete_config(settings: Mapping[str, Any], *, of: str) -> Config:
    """Fill in the defaults of a family, and keep what its modules read; ``of`` is for the errors.

    Raises SbkitError.
    """
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise SbkitError(
            f"`model_type` of {of} must be {', '.join(FAMILIES)}, but is {family}."
            f"{did_you_mean(str(family), FAMILIES)} Take a model of one of these families."
        )
    for name in UNSUPPORTED:
        if settings.get(name):
            raise SbkitError(
                f"`{name}` of {of} must be false or null, but is {settings[name]}: such a "
                f"{family} is not supported. Take a model without it."
            )
    config = {name: settings.get(name, each) for name, each in FAMILIES[family].items()}
    for name, default in FAMILIES[family].items():
        if not _is_like(default, config[name], name):
            raise SbkitError(
                f"`{name}` of {of} must be {_wanted(default, name)}, but is {config[name]}. "
                "Correct it, or take another model."
            )
    _check_sizes(config, of)
    return {"model_type": family, **config, "source": settings.get("source")}


def _audio(folder: Path) -> Config:
    """Read how features are made of audio; transformers 5 writes it into the processor's file."""
    found = read_json(folder, PREPROCESSOR)
    if found is None:
        found = (read_json(folder, PROCESSOR) or {}).get("feature_extractor")
    if not isinstance(found, Mapping) or "sampling_rate" not in found:
        raise SbkitError(
            f"{folder} must hold {PREPROCESSOR}, which says the rate of the audio and whether it "
            "is normalized, but has none that does. Download it, or save the model's feature "
            "extractor there, too."
        )
    return {**found, "sample_rate": found["sampling_rate"]}


def _is_like(default: Any, value: Any, name: str) -> bool:
    if name in WORDS:
        return value in WORDS[name]
    if isinstance(default, list):
        return isinstance(value, list) and bool(value) and all(each in SIZE for each in value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    return value in (SIZE if isinstance(default, int) else NOT_NEGATIVE)


def _wanted(default: Any, name: str) -> str:
    if name in WORDS:
        return " or ".join(WORDS[name])
    kinds = {list: f"a list, each {SIZE}", bool: "true or false", int: str(SIZE)}
    return kinds.get(type(default), str(NOT_NEGATIVE))


def _check_sizes(config: Config, of: str) -> None:
    hidden = config["hidden_size"]
    for name in MULTIPLE:
        if hidden % config.get(name, 1):
            raise SbkitError(
                f"`hidden_size` of {of} must be a multiple of `{name}` ({config[name]}), but is "
                f"{hidden}. Take a model whose {CONFIG} is its own."
            )
    stacked = config.get("num_mel_bins", 1) * config.get("stride", 0)
    if stacked and stacked != config["feature_projection_input_dim"]:
        raise SbkitError(
            f"`feature_projection_input_dim` of {of} must be `num_mel_bins` times `stride` of "
            f"{PREPROCESSOR}, {stacked}, but is {config['feature_projection_input_dim']}. Take "
            "both files of one model."
        )
    lengths = {name: len(config[name]) for name in PARALLEL if name in config}
    if len({*lengths.values()}) > 1:
        came = listed(f"{count} in `{name}`" for name, count in lengths.items())
        raise SbkitError(
            f"The convolutions of {of} must have a width, a stride and a kernel each, but there "
            f"are {came}. Take a model whose {CONFIG} is its own."
        )


def _licence(folder: Path) -> str:
    """Find the licence in the front matter of the model card."""
    if (file := file_in(folder, CARD)) is None:
        return UNKNOWN
    text = read_regular(file, largest=LARGEST, what="A model card").decode(errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return found[1].strip("'\"") if found else UNKNOWN

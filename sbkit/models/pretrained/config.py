"""The sizes of a pretrained encoder: what `config.json` says, with the defaults that it leaves out.

The keys and their defaults are Hugging Face's (transformers 5.23, `models/*/configuration_*.py`);
only those that the modules of this folder read are kept. Beside them:

    do_normalize   whether the model was trained on clips of zero mean and unit variance
    sample_rate    Hz
    source         name, license and SHA-256 of the weights of the base model; null: from nothing
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.document import did_you_mean
from sbkit.config.ranges import NOT_NEGATIVE, Range
from sbkit.models.pretrained.folder import (
    CONFIG,
    LARGEST,
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
FAMILIES: dict[str, Config] = {  # by model_type
    "wav2vec2": WAV2VEC2,
    "hubert": {**WAV2VEC2, "feat_proj_layer_norm": True},
    "wavlm": {**WAV2VEC2, "num_buckets": 320, "max_bucket_distance": 800},
    "wav2vec2-bert": W2V_BERT,
    "parakeet_encoder": PARAKEET,
}
UNSUPPORTED = {  # unless false or null
    "auto_map": "null: it asks for code of its author, which is not run",
    "add_adapter": "false: such models are not supported",
    "adapter_attn_dim": "null: such models are not supported",
    "conv_pos_batch_norm": "false: such models are not supported",
}
WORDS = {
    "hidden_act": ("gelu", "relu", "silu", "swish"),
    "feat_extract_activation": ("gelu", "relu", "silu", "swish"),
    "feat_extract_norm": ("group", "layer"),
    "position_embeddings_type": ("relative_key",),
}
SIZE = Range(low=1, high=1 << 16, whole=True, advice="Take another model.")
MULTIPLE = ("num_attention_heads", "num_conv_pos_embedding_groups")  # hidden_size is one of each
PREPROCESSOR, PROCESSOR, CARD = "preprocessor_config.json", "processor_config.json", "README.md"


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
    inner = whole.get("encoder_config") or {}  # of a model with a head
    config = complete_config({**whole, **inner, **_audio(folder)}, of=str(folder / CONFIG))
    name = folder.resolve().name
    if folder.parent.name == SNAPSHOTS:
        name = home_of(folder).name.removeprefix("models--").replace("--", "/")
    source = {"name": name, "license": _license(folder), "sha256": hash_weights(folder)}
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
    config = {name: settings.get(name, each) for name, each in FAMILIES[family].items()}
    for name, must in _faults({**settings, **config}, FAMILIES[family]):
        came = config.get(name, settings.get(name))
        raise SbkitError(
            f"`{name}` of {of} must be {must}, but is {came}. Correct it, or take another model."
        )
    return {"model_type": family, **config, "source": settings.get("source")}


def _faults(settings: Mapping[str, Any], defaults: Config) -> Iterator[tuple[str, str]]:
    """Yield what is not as it must be, and how that is."""
    yield from ((name, must) for name, must in UNSUPPORTED.items() if settings.get(name))
    for name, default in defaults.items():
        must, is_met = _rule(name, default, settings[name])
        if not is_met:
            yield name, must
    for name in MULTIPLE:
        if settings["hidden_size"] % settings.get(name, 1):
            yield "hidden_size", f"a multiple of `{name}` ({settings[name]})"
    for name in ("conv_kernel", "conv_stride"):
        if len(settings.get(name, ())) != (count := len(settings.get("conv_dim", ()))):
            yield name, f"a list as long as `conv_dim` ({count})"
    if "feature_projection_input_dim" in defaults:
        stacked = settings["num_mel_bins"] * settings["stride"]
        if settings["feature_projection_input_dim"] != stacked:
            must = f"`num_mel_bins` times `stride` of {PREPROCESSOR}, {stacked}"
            yield "feature_projection_input_dim", must


def _rule(name: str, default: Any, value: Any) -> tuple[str, bool]:
    """Say what a value must be by its name or its default, and whether it is that."""
    if name in WORDS:
        return " or ".join(WORDS[name]), value in WORDS[name]
    if isinstance(default, bool):
        return "true or false", isinstance(value, bool)
    if isinstance(default, list):
        is_list = isinstance(value, list) and bool(value)
        return f"a list, each {SIZE}", is_list and all(each in SIZE for each in value)
    allowed = SIZE if isinstance(default, int) else NOT_NEGATIVE
    return str(allowed), value in allowed


def _audio(folder: Path) -> Config:
    """Read how features are made of audio; transformers 5 writes it into the processor's file."""
    processor = read_json(folder, PROCESSOR) or {}
    found = read_json(folder, PREPROCESSOR) or processor.get("feature_extractor") or {}
    if "sampling_rate" not in found:
        raise SbkitError(
            f"{folder} must hold {PREPROCESSOR}, which says the rate of the audio and whether it "
            "is normalized, but has none that does. Download it, or save the model's feature "
            "extractor there, too."
        )
    return {**found, "sample_rate": found["sampling_rate"]}


def _license(folder: Path) -> str:
    """Find the license in the front matter of the model card."""
    found = None
    if (file := file_in(folder, CARD)) is not None:
        text = read_regular(file, max_bytes=LARGEST, subject="A model card").decode(
            errors="replace"
        )
        found = re.match(r"---\s*\n(?:(?!---).*\n)*?license:\s*(\S+)", text)
    return found[1].strip("'\"") if found else "unknown"

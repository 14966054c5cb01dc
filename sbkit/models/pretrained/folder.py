"""The folder of a pretrained encoder, as `save_pretrained` or a download from a hub writes it.

Its files are read as data: nothing is executed. Keys and defaults of the configuration are Hugging
Face's (transformers 5.23, `models/*/configuration_*.py`). Keys that no module here reads are
dropped, and `do_normalize`, `sample_rate` and `source` are added.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sbkit.base.errors import BundleError, ConfigError, DeviceError
from sbkit.base.files import parsing_errors, plain_name, read_regular
from sbkit.base.machine import available_memory
from sbkit.base.messages import did_you_mean, listed
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.pretrained.blocks import Config
from sbkit.models.pretrained.encoder import FAMILIES, PretrainedEncoder, PretrainedFrontEnd
from sbkit.models.pretrained.transformers_encoder import CLASSES, complete_settings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SNAPSHOTS = "snapshots"  # the folder of a model's commits in the hub's cache
WHOLE_FILE = "be a whole file"  # what a parser requires
DOWNLOAD_AGAIN = "Download it again."


def commit_of(folder: Path) -> str | None:
    """Return the commit of a model in the hub's cache, None for another folder."""
    return folder.name if folder.parent.name == SNAPSHOTS else None


def model_name_of(folder: Path) -> str:
    """Return the name of a folder, or the id of a model in the hub's cache."""
    if commit_of(folder) is None:
        return folder.resolve().name
    return folder.parents[1].name.removeprefix("models--").replace("--", "/")


def file_in(folder: Path, name: str) -> Path | None:
    """Return the path of a file in the folder, with links resolved, None if it is missing."""
    path = folder / name
    return path.resolve() if path.is_file() else None


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a JSON file, None if missing."""
    if (file := file_in(folder, name)) is None:
        return None
    with parsing_errors(folder / name, WHOLE_FILE, fix=DOWNLOAD_AGAIN, is_json=True):
        return {**json.loads(read_regular(file, subject=f"The {name}"))}


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files of the weights: one, or the shards of the index."""
    index = read_json(folder, INDEX)
    if index is None or file_in(folder, WEIGHTS) is not None:
        return [WEIGHTS]
    return sorted({plain_name(name, file=folder / INDEX) for name in index["weight_map"].values()})


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights; raises BundleError if one is missing."""
    files = {name: file_in(folder, name) for name in weight_names(folder)}
    if missing := [name for name, file in files.items() if file is None]:
        raise BundleError(
            f"{folder} has no {missing[0]}. Download it. If there is only a pickle such as "
            "pytorch_model.bin, convert it (docs/guide/fine-tuning.md)."
        )
    return [file for file in files.values() if file is not None]


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 of the weights, over all shards in order."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


# ---- configuration


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
WHISPER_DEFAULTS: Config = {
    **_sizes(384, 4, 6, 1536),
    **{"hidden_act": "gelu", "num_mel_bins": 80, "max_source_positions": 1500},
    **{"n_fft": 400, "hop_length": 160},
    **{"decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536},
    **{"vocab_size": 51865, "max_target_positions": 448},
}
WHISPER_NAMES = {  # keys of its config.json, which also has the sizes of a decoder
    **{"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"},
    **{"num_attention_heads": "encoder_attention_heads", "intermediate_size": "encoder_ffn_dim"},
    "hidden_act": "activation_function",
}
DEFAULTS: dict[str, Config] = {  # keyed by model_type
    "wav2vec2": WAV2VEC2,
    "hubert": {**WAV2VEC2, "feat_proj_layer_norm": True},
    "wavlm": {**WAV2VEC2, "num_buckets": 320, "max_bucket_distance": 800},
    "whisper": WHISPER_DEFAULTS,
}
PREPROCESSOR, PROCESSOR, CARD = "preprocessor_config.json", "processor_config.json", "README.md"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"  # files of a decoder of text


def read_encoder_config(folder: Path) -> Config:
    """Read the configuration of an encoder, and hash its weights."""
    config = read_settings(folder)
    source = {
        "name": model_name_of(folder),
        "revision": commit_of(folder),
        "license": _read_license(folder),
        "sha256": hash_weights(folder),
    }
    return {**config, "source": source}


def _read_text_tokens(folder: Path) -> Config | None:
    """Return the special tokens of a decoder of text; None if the folder does not list them.

    languages, tasks: the tokens at the start of a text that name its language and the task; none
        for an English model.
    start, no_times, end: the first token of a text, the token of a text without times, and the
        last token.
    suppressed, suppressed_first: tokens that no text may contain, and that none may begin with.
    alignment_heads: (layer, head) of the attention that other libraries use to time words.
    """
    settings = read_json(folder, GENERATION)
    if settings is None or "no_timestamps_token_id" not in settings:
        return None
    token_maps = settings if settings.get("is_multilingual", True) else {}
    languages, tasks = (
        {name.strip("<|>"): token for name, token in (token_maps.get(key) or {}).items()}
        for key in ("lang_to_id", "task_to_id")
    )
    return {
        **{"languages": languages, "tasks": tasks},
        "start": settings["decoder_start_token_id"],
        "end": settings["eos_token_id"],
        "no_times": settings["no_timestamps_token_id"],
        "suppressed": settings.get("suppress_tokens") or [],
        "suppressed_first": settings.get("begin_suppress_tokens") or [],
        "alignment_heads": settings.get("alignment_heads") or [],
    }


def read_settings(folder: Path) -> Config:
    """Read the configuration of an encoder, without its source and its weights."""
    settings = read_json(folder, CONFIG)
    if settings is None:
        raise BundleError(f"`pretrained` must be a folder with {CONFIG}, but {folder} has none.")
    features = read_feature_settings(folder)
    encoder_settings = settings.get("encoder_config") or {}  # in a model with a head
    settings = {**settings, **encoder_settings, **features}
    settings = {**settings, "sample_rate": features["sampling_rate"]}
    settings = {**settings, "text_tokens": _read_text_tokens(folder)}
    config = complete_config(settings, source_file=str(folder / CONFIG))
    if config.get("feat_extract_norm") == "group":
        # The norm undoes any level, but not its epsilon: quiet clips would become fainter features.
        config = {**config, "do_normalize": True}
    return config


def read_feature_settings(folder: Path) -> dict[str, Any]:
    """Read the configuration of the features, such as `sampling_rate`."""
    processor = read_json(folder, PROCESSOR) or {}  # where transformers 5 writes the features
    features = read_json(folder, PREPROCESSOR) or processor.get("feature_extractor") or {}
    if "sampling_rate" not in features:
        raise BundleError(f"{folder} has no {PREPROCESSOR} with a sampling_rate. Download it.")
    return {**features}


def complete_config(settings: Config, *, source_file: str) -> Config:
    """Keep the settings that a family's modules read, and add defaults."""
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"`model_type` in {source_file} must be {', '.join(FAMILIES)}, but is {family}."
            f"{did_you_mean(str(family), FAMILIES)}"
        )
    source = {"source": settings.get("source")}
    if family in CLASSES:
        return {"model_type": family, **complete_settings(settings), **source}
    if family == "whisper":
        names = {key: name for key, name in WHISPER_NAMES.items() if name in settings}
        settings = {**settings, **{key: settings[name] for key, name in names.items()}}
    config = {key: settings.get(key, default) for key, default in DEFAULTS[family].items()}
    tokens = {"text_tokens": settings.get("text_tokens")} if family == "whisper" else {}
    return {"model_type": family, **config, **tokens, **source}


def _read_license(folder: Path) -> str:
    """Find the license in the front matter of the model card, or several, separated by commas."""
    if (file := file_in(folder, CARD)) is None:
        return "unknown"
    card = read_regular(file, subject="A model card")
    front_matter = r"---\s*\n(?:(?!---).*\n)*?license:([^\n#]*(?:\n[ \t]*- [^\n#]*)*)"
    match = re.match(front_matter, card.decode(errors="replace"))
    licenses = re.split(r"[\n,]", match[1]) if match else []
    return ", ".join(filter(None, (name.strip(" \t\r'\"-[]") for name in licenses))) or "unknown"


# ---- weights

# The tensors of models with a head have a prefix.
HEAD_PREFIXES = (
    *("", "wav2vec2.", "hubert.", "wavlm.", "wav2vec2_bert.", "encoder.", "model.encoder."),
)
RENAMED = {  # weight norm before torch 2.0
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}
MASK_VECTOR = "masked_spec_embed"  # replaces masked frames
MAX_LISTED_TENSORS = 4

Stored = dict[str, Any]  # slices of the files, keyed by the names of tensors since torch 2.0


def check_tensors(folder: Path, config: Config, *, layers: int | None = None) -> None:
    """Compare the names and shapes of a folder's tensors with its config, without reading them."""
    with torch.device("meta"):
        encoder = PretrainedEncoder(config=config, layers=layers, mask_time_prob=0.0)
        parts = [PretrainedFrontEnd(config=config), encoder]
    tensors, _ = _match_tensors(folder, parts)
    needed = sum(tensor.nbytes for tensor in tensors.values())
    free = available_memory()
    if needed > free:
        raise DeviceError(
            f"The weights of {folder} take {needed / 2**30:.1f} GiB in float32, but only "
            f"{free / 2**30:.1f} GiB of memory are free."
        )


def load_weights(folder: Path, objects: Iterable[object]) -> str:
    """Load the weights of a folder into the parts among the objects; return a line for the log."""
    parts = [part for part in objects if isinstance(part, PretrainedFrontEnd | PretrainedEncoder)]
    tensors, stored = _match_tensors(folder, parts)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored[name][...])
    unused = [name for name in stored if name not in tensors]
    note = f"; not used: {listed(unused, max_names=MAX_LISTED_TENSORS)}" if unused else ""
    commit = commit_of(folder)
    model = f"{model_name_of(folder)}, commit {commit}, in the cache" if commit else folder
    size = sum(file.stat().st_size for file in weight_files(folder)) / 1e6
    return f"pretrained {model} ({size:,.1f} MB): loaded {len(tensors)} tensors{note}."


def _match_tensors(folder: Path, parts: Iterable[nn.Module]) -> tuple[dict[str, Tensor], Stored]:
    """Return the tensors of parts and the slices of files, both keyed by the names in the files."""
    stored: Stored = {}
    for file in weight_files(folder):
        with parsing_errors(file, WHOLE_FILE, fix=DOWNLOAD_AGAIN):
            slices: Any = safe_open(file, framework="pt")
            for name in [*slices.keys()]:
                module, _, last = name.rpartition(".")
                current_name = f"{module}.{RENAMED[last]}" if last in RENAMED else name
                stored[current_name] = slices.get_slice(name)
    tensors: dict[str, Tensor] = {}
    decoder: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            child, _, path = name.partition(".")
            if child == "body" and "lora_" not in path:
                tensors[f"{getattr(part, 'prefix', '')}{path}"] = tensor
            elif child == "decoder" and "lora_" not in path:
                decoder[name] = tensor
    prefix = max(HEAD_PREFIXES, key=lambda p: sum(f"{p}{name}" in stored for name in tensors))
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    beside = prefix.removesuffix("encoder.")  # where a model has its decoder
    tensors |= {f"{beside}{name}": tensor for name, tensor in decoder.items()}
    _require_same_shapes(folder, tensors, stored)
    return tensors, stored


def _require_same_shapes(folder: Path, tensors: Mapping[str, Tensor], stored: Stored) -> None:
    faults: list[str] = []
    for name, tensor in tensors.items():
        if name not in stored:
            faults.append(f"{name} (missing)")
        elif (shape := tuple(stored[name].get_shape())) != tensor.shape:
            faults.append(f"{name} ({shape}, not {tuple(tensor.shape)})")
    fix = DOWNLOAD_AGAIN
    if len(faults) == 1 and faults[0].endswith(f"{MASK_VECTOR} (missing)"):
        fix = "Set `mask_time_prob: 0`, or use a model that was trained with masks."
    if faults:
        raise BundleError(
            f"Tensors in {folder} do not match its config.json: "
            f"{listed(faults, max_names=MAX_LISTED_TENSORS)}. {fix}"
        )

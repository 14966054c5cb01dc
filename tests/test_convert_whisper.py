"""A Whisper of CTranslate2, as its specification writes it, becomes a folder for `--pretrained`."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sbkit.models.pretrained.folder import load_weights, read_encoder_config
from tests.models.pretrained.folders import encode, file_tensors, make_parts, tiny_config
from tools.convert_whisper import convert

LAYER_NAMES = [
    ("self_attn_layer_norm", "self_attention/layer_norm"),
    ("self_attn.out_proj", "self_attention/linear_1"),
    ("final_layer_norm", "ffn/layer_norm"),
    ("fc1", "ffn/linear_0"),
    ("fc2", "ffn/linear_1"),
]
TYPES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4, "uint16": 5}  # uint16: bfloat16
# Of states of about 1.
DIFFERENCES = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.15, "int8": 0.3}


def name_in_ctranslate2(name: str) -> str:
    for theirs, ours in LAYER_NAMES:
        name = name.replace(theirs, ours)
    name = name.replace("layers.", "layer_").replace("embed_positions.weight", "position_encodings")
    name = f"encoder/{name.replace('.', '/')}".replace("encodings", "encodings/encodings")
    if "norm" in name:
        name = name.replace("weight", "gamma").replace("bias", "beta")
    return name


def variables_of(tensors: dict[str, Tensor], kind: str) -> dict[str, Any]:
    """Return the variables of a model by CTranslate2's names, in a type of numbers."""
    variables: dict[str, Any] = {"encoder/num_heads": np.array(4, np.int16)}
    variables["decoder/embeddings/weight"] = np.zeros((7, 24), np.float32)
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        attention, _, projection = stem.rpartition(".")
        if projection in ("q_proj", "k_proj", "v_proj"):
            layer = name_in_ctranslate2(attention).replace("self_attn", "self_attention/linear_0")
            fused.setdefault(f"{layer}/{last}", []).append(tensor)
        else:
            variables[name_in_ctranslate2(name)] = tensor.numpy()
    for name, parts in fused.items():
        parts = parts if len(parts) == 3 else [parts[0], torch.zeros_like(parts[0]), parts[1]]
        variables[name] = torch.cat(parts).numpy()
    for name, values in [*variables.items()]:
        if kind == "int8" and name.endswith("weight") and values.ndim == 2:
            scale = (127 / np.abs(values).max(1).clip(min=1e-9)).astype(np.float32)
            variables[name] = np.round(values * scale[:, None]).astype(np.int8)
            variables[f"{name}_scale"] = scale
        elif values.dtype == np.float32 and kind == "float16":
            variables[name] = values.astype(np.float16)
        elif values.dtype == np.float32 and kind == "bfloat16":
            variables[name] = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return variables


def model_bin(variables: dict[str, Any]) -> bytes:
    """Write a file as `python/ctranslate2/specs/model_spec.py` does."""

    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    content = struct.pack("<I", 6) + text("WhisperSpec")
    content += struct.pack("<II", 3, len(variables))
    for name, values in variables.items():
        content += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        content += struct.pack("<BI", TYPES[values.dtype.name], values.nbytes) + values.tobytes()
    return content + struct.pack("<I", 1) + text("decoder/projection/weight") + text(name)


def tiny_model_bin(kind: str = "float32", **config: Any) -> bytes:
    """Return a tiny model of random weights."""
    parts = make_parts(tiny_config("whisper", **config))
    return model_bin(variables_of(file_tensors(*parts), kind))


@pytest.mark.parametrize("kind", DIFFERENCES)
@torch.no_grad()
def test_converted_encoder_has_the_states_of_the_original(kind: str, tmp_path: Path) -> None:
    config = tiny_config("whisper")
    parts = make_parts(config)
    file = tmp_path / "model.bin"
    file.write_bytes(tiny_model_bin(kind))
    convert(file, tmp_path / "out", "apache-2.0")
    read = read_encoder_config(tmp_path / "out")
    assert read.pop("source")["license"] == "apache-2.0"
    assert read == {key: value for key, value in config.items() if key != "source"}
    converted = make_parts(read)
    load_weights(tmp_path / "out", converted)
    audio = torch.randn(1, 9000)
    states, expected = (encode(config, these, audio, 9000) for these in (converted, parts))
    assert float((states - expected).abs().max()) <= DIFFERENCES[kind]

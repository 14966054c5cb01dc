"""Convert the encoder of a Whisper model of CTranslate2 (faster-whisper) for `--pretrained`.

python -m tools.convert_whisper MODEL.BIN FOLDER [--license mit]

Many people have Whisper only as the `model.bin` of faster-whisper. FOLDER gets its encoder in
float32, as config.json, preprocessor_config.json and model.safetensors under the names of
transformers.

The layout of a file, after CTranslate2's `python/ctranslate2/specs/model_spec.py` (version 6):
version, name of the specification, revision, a number of variables, and a number of aliases. A
variable is its name, rank, sizes, type, number of bytes, and bytes; an alias its own name and that
of a variable. A name is its length in two bytes, and text that ends in zero. Numbers are
little-endian, of four bytes; rank and type of one.
"""

import argparse
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sbkit.base.files import to_json
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE

VERSIONS = (5, 6)
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2", 5: "<u2"}
BFLOAT16 = 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # one matrix in CTranslate2
RENAMED = (
    ("encoder/position_encodings/encodings", "encoder/embed_positions/weight"),
    (r"encoder/layer_(\d+)", r"encoder/layers/\1"),
    ("self_attention/layer_norm", "self_attn_layer_norm"),
    ("self_attention/linear_1", "self_attn/out_proj"),
    ("self_attention/linear_0", "self_attn/qkv"),
    ("ffn/layer_norm", "final_layer_norm"),
    ("ffn/linear_0", "fc1"),
    ("ffn/linear_1", "fc2"),
    ("gamma$", "weight"),
    ("beta$", "bias"),
    ("/", "."),
)


def main() -> None:
    """Read the file and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--license", default="mit", help="of the weights; OpenAI's are MIT")
    options = parser.parse_args()
    convert(options.file, options.folder, options.license)


def convert(file: Path, folder: Path, license: str) -> None:
    """Write the encoder of a model into a folder."""
    with file.open("rb") as opened:
        variables = dict(read_variables(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)))
    tensors = dict(rename(variables))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": SAMPLE_RATE}
    extractor["feature_size"] = tensors["encoder.conv1.weight"].shape[1]
    config = sizes_of(tensors, heads=int(variables["encoder/num_heads"]))
    for name, content in (("config", config), ("preprocessor_config", extractor)):
        (folder / f"{name}.json").write_text(to_json(content, indent=1), encoding="utf-8")
    (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n", encoding="utf-8")
    print(f"{folder}: {len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} numbers")


def read_variables(content: mmap.mmap) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the name and the numbers of each variable, and of each alias of one."""
    position = 0

    def read(fields: str) -> tuple[Any, ...]:
        nonlocal position
        values = struct.unpack_from(f"<{fields}", content, position)
        position += struct.calcsize(f"<{fields}")
        return values

    def read_name() -> str:
        (name,) = read(f"{read('H')[0]}s")
        return str(name.rstrip(b"\0").decode())

    (version,) = read("I")
    specification = read_name()
    if version not in VERSIONS or specification != "WhisperSpec":
        raise ValueError(f"version {version} of {specification!r} is not read")
    _revision, count = read("II")
    variables = {}
    for _ in range(count):
        name = read_name()
        shape = read(f"{read('B')[0]}I")
        type_id, size = read("BI")
        dtype = np.dtype(TYPES[type_id])
        values = np.frombuffer(content, dtype, size // dtype.itemsize, position)
        if type_id == BFLOAT16:  # the upper half of float32
            values = (values.astype("<u4") << 16).view("<f4")
        variables[name] = values.reshape(shape)
        position += size
    yield from variables.items()
    for _ in range(read("I")[0]):
        yield read_name(), variables[read_name()]


def rename(variables: dict[str, np.ndarray[Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the encoder in float32 by their names in transformers."""
    for name, values in variables.items():
        if not name.startswith("encoder/") or name.endswith("_scale") or not values.ndim:
            continue
        tensor = torch.from_numpy(values.astype(np.float32))
        if (scale := variables.get(f"{name}_scale")) is not None:  # int8, by rows
            tensor = tensor / torch.from_numpy(scale.copy()).view(-1, *[1] * (tensor.ndim - 1))
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if ".qkv." not in name:
            yield name, tensor
            continue
        for projection, part in zip(PROJECTIONS, tensor.chunk(3), strict=True):
            if (projection, name.rpartition(".")[2]) != ("k_proj", "bias"):  # it is zero
                yield name.replace("qkv", projection), part.clone()


def sizes_of(tensors: dict[str, Tensor], heads: int) -> dict[str, Any]:
    """Return the config.json that the shapes of tensors tell."""
    inner, width = tensors["encoder.layers.0.fc1.weight"].shape
    return {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": sum(name.endswith("fc1.weight") for name in tensors),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": inner,
        "num_mel_bins": tensors["encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["encoder.embed_positions.weight"]),
        # Transformers' WhisperModel takes the folder, too, without a decoder.
        "decoder_layers": 0,
        "decoder_attention_heads": heads,
    }


if __name__ == "__main__":
    run_main(main)

"""Convert the encoder of a Whisper model of CTranslate2 (faster-whisper) for `--pretrained`.

python -m tools.convert_whisper MODEL.BIN [MORE.BIN ...] FOLDER [--license mit]

Many people have Whisper only as the `model.bin` of faster-whisper. FOLDER gets its encoder in
float32, as config.json, preprocessor_config.json and model.safetensors under the names of
transformers. Several files are the pieces of one, in order. float32, float16 and int8 are read.

The layout of a file, after CTranslate2's `python/ctranslate2/specs/model_spec.py` (version 6):
version, name of the specification, revision, and a number of variables. Each is its name, rank,
sizes, type, number of bytes, and bytes. A name is its length in two bytes, and text that ends in
zero. Numbers are little-endian, of four bytes; rank and type of one.
"""

import argparse
import json
import mmap
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sbkit.base.errors import BundleError
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE

VERSIONS = (5, 6)
TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # one matrix in CTranslate2
RENAMED = [  # the first that matches
    (r"encoder/position_encodings/encodings", "encoder.embed_positions.weight"),
    (r"/self_attention/layer_norm/", ".self_attn_layer_norm."),
    (r"/self_attention/linear_1/", ".self_attn.out_proj."),
    (r"/self_attention/linear_0/", ".self_attn.qkv."),
    (r"/ffn/layer_norm/", ".final_layer_norm."),
    (r"/ffn/linear_0/", ".fc1."),
    (r"/ffn/linear_1/", ".fc2."),
]


def main() -> None:
    """Read the pieces of a file and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pieces", nargs="+", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--license", default="mit", help="of the weights; OpenAI's are MIT")
    options = parser.parse_args()
    convert(options.pieces, options.folder, options.license)


def convert(pieces: list[Path], folder: Path, license: str) -> None:
    """Write the encoder of a model, which may be in pieces, into a folder.

    Raises:
        BundleError: the file is not a whole Whisper of CTranslate2, or of an unknown version.
    """
    with tempfile.TemporaryFile() as whole:
        for piece in pieces:
            whole.write(piece.read_bytes())
        whole.flush()
        content = mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            variables = dict(read_variables(content))
        except (struct.error, ValueError, KeyError) as error:
            raise BundleError(
                f"{pieces[0]} is not a whole model.bin of CTranslate2 ({error}). Pass the pieces "
                "of one model in order, or convert it with ct2-transformers-converter again."
            ) from error
    tensors = dict(rename(variables))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", sizes_of(tensors, int(variables["encoder/num_heads"])))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": SAMPLE_RATE}
    bins = tensors["encoder.conv1.weight"].shape[1]
    write_json(folder / "preprocessor_config.json", extractor | {"feature_size": bins})
    (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n", encoding="utf-8")
    print(f"{folder}: {len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} numbers")


def read_variables(content: mmap.mmap) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the name and the numbers of each variable."""
    position = 0

    def read(form: str) -> tuple[Any, ...]:
        nonlocal position
        values = struct.unpack_from(f"<{form}", content, position)
        position += struct.calcsize(f"<{form}")
        return values

    def read_name() -> str:
        (name,) = read(f"{read('H')[0]}s")
        return str(name.rstrip(b"\0").decode())

    (version,) = read("I")
    specification = read_name()
    if version not in VERSIONS or specification != "WhisperSpec":
        raise ValueError(f"version {version} of {specification!r}")
    _revision, count = read("II")
    for _ in range(count):
        name = read_name()
        shape = read(f"{read('B')[0]}I")
        kind, size = read("BI")
        values = np.frombuffer(
            content, TYPES[kind], size // np.dtype(TYPES[kind]).itemsize, position
        )
        yield name, values.reshape(shape)
        position += size


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
        name = name.replace("encoder/layer_norm/", "encoder.layer_norm.")
        name = re.sub(r"encoder/layer_(\d+)", r"encoder.layers.\1", name).replace("/", ".")
        name = name.replace("gamma", "weight").replace("beta", "bias")
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
    }


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write an object, with a line for each key."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)

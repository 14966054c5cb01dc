"""The folder of a pretrained encoder, as `save_pretrained` or a download from a hub leaves it.

Its files are read as data. Nothing in it is executed, and no connection is opened.

The tensors of a pretrained encoder: from the files of its folder into the parts of a YAML.

The files are mapped, and read tensor by tensor, so that memory stays that of the model. What a part
has beside the model of the files, such as an adapter, is left as it was made.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading
from sbkit.base.machine import available_memory
from sbkit.base.messages import listed
from sbkit.models.pretrained.parts import PretrainedEncoder, PretrainedFrontEnd

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SNAPSHOTS = "snapshots"  # the folder of a model in the hub's cache that has one for each commit
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LARGEST = 1 << 25  # bytes of a JSON file or of a model card
WHOLE, AGAIN = "be a whole file", "Download it again."


def find_folder(named: str) -> Path:
    """Return the folder that `pretrained` names: by its path, or by its id in the hub's cache.

    Raises SbkitError where it is neither.
    """
    if (folder := Path(named).expanduser()).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache  # asks the disk alone, where HF_HOME is

    with suppress(ValueError):  # no id
        if isinstance(found := try_to_load_from_cache(named, CONFIG), str):
            return Path(found).parent
    raise SbkitError(
        f"`pretrained` must name a folder, or the id of a model in the cache of huggingface_hub, "
        f"but {named} is neither. Download it first (hf download {named}), or correct its name."
    )


def home_of(folder: Path) -> Path:
    """Return what holds all files of a folder: itself, or that of a model in the hub's cache."""
    return folder.parents[1] if folder.parent.name == SNAPSHOTS else folder.resolve()


def file_in(folder: Path, name: str) -> Path | None:
    """Return where a file of the folder lies, or None; the hub's cache links to its own blobs.

    Raises SbkitError for a link that leads elsewhere or nowhere, and for what is no file.
    """
    path, real = folder / name, (folder / name).resolve()
    if not (path.is_symlink() or path.exists()):
        return None
    is_within = real.is_relative_to(home_of(folder).resolve())
    if not (is_within and real.is_file()):
        why = "is no file, or half a download" if is_within else f"leads out of it, to {real}"
        raise SbkitError(f"{path} must be a file of its folder, but {why}. {AGAIN}")
    return real


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a file of settings, None where it is not there; raises SbkitError."""
    if (file := file_in(folder, name)) is None:
        return None
    with reading(folder / name, must=WHOLE, fix=AGAIN):
        return {**json.loads(read_regular(file, max_bytes=LARGEST, subject=f"The {name}"))}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of tensors: the one, or the shards that the index names; raises SbkitError.

    Pickles are refused: reading one runs what it holds.
    """
    names = [WEIGHTS]
    if (index := read_json(folder, INDEX)) is not None and file_in(folder, WEIGHTS) is None:
        with reading(folder / INDEX, must=WHOLE, fix=AGAIN):
            names = sorted({*index["weight_map"].values()})
    files = {name: file_in(folder, name) for name in names}
    if missing := [name for name, file in files.items() if file is None]:
        pickles = [name for name in PICKLES if (folder / name).exists()]
        came = f"only {pickles[0]}" if pickles and index is None else f"no {missing[0]}"
        raise SbkitError(
            f"{folder} must hold {WEIGHTS}, or {INDEX} and every file that it names, but has "
            f"{came}. Download them again, or load the model with transformers, which you trust "
            "for it, and call its save_pretrained."
        )
    return [file for file in files.values() if file is not None]


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 of the tensors' file, or of those of all shards in their order."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


PREFIXES = ("", "wav2vec2.", "hubert.", "wavlm.", "wav2vec2_bert.", "encoder.")  # of head models
RENAMED = {  # weight norm as torch wrote it before 2.0
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}
NUMBERS = ("F64", "F32", "F16", "BF16")
MASK = "masked_spec_embed"  # what stands in the place of hidden frames
SHOWN = 4  # names in a sentence

Stored = dict[str, Any]  # what is to be read of a file, by the name that a tensor has today


def check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare the tensors of a folder with the sizes of its config; nothing is read or allocated.

    Raises SbkitError where names or shapes differ, and for a model larger than the memory.
    """
    with torch.device("meta"):
        encoder = PretrainedEncoder(config=config, mask_time_prob=0.0)
        parts = [PretrainedFrontEnd(config=config), encoder]
    ours, _ = _matched(folder, parts)
    needed, free = sum(each.nbytes for each in ours.values()), available_memory()
    if needed > free:
        raise SbkitError(
            f"`pretrained` must name a model that fits into the memory, but the weights of "
            f"{folder} take {needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB are "
            "free. Take a smaller model or a larger machine."
        )


def load_weights(folder: Path, objects: Iterable[object]) -> str:
    """Load the tensors of a folder into the parts among the objects; return a line about it.

    Raises SbkitError for a tensor that is missing, of another shape, or not finite.
    """
    parts = [each for each in objects if isinstance(each, PretrainedFrontEnd | PretrainedEncoder)]
    ours, stored = _matched(folder, parts)
    with torch.no_grad():
        for name, tensor in ours.items():
            value = stored[name][...]
            if value.is_floating_point() and not value.isfinite().all():
                _require_none(folder, {name: "not finite"})
            tensor.copy_(value)
    left = [name for name in stored if name not in ours]
    unused = f"; not used: {listed(left, max_names=SHOWN)}" if left else ""
    return f"pretrained {folder}: {len(ours)} tensors are loaded{unused}."


def _matched(folder: Path, parts: Iterable[nn.Module]) -> tuple[dict[str, Tensor], Stored]:
    """Return our tensors by their names in the files, and those there by their names today.

    Raises SbkitError for a file that is not whole, and for a tensor that is missing or another.
    """
    stored: Stored = {}
    for path in weight_files(folder):
        with reading(path, must=WHOLE, fix=AGAIN):
            file: Any = safe_open(path, framework="pt")
            stored |= {_renamed(name): file.get_slice(name) for name in [*file.keys()]}
    ours = _tensors(parts, stored)
    _require_none(folder, {name: _fault(stored, name, each) for name, each in ours.items()})
    return ours, stored


def _renamed(name: str) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}.{RENAMED[last]}" if last in RENAMED else name


def _tensors(parts: Iterable[nn.Module], stored: Stored) -> dict[str, Tensor]:
    """Return our tensors by their names in the files, whose prefix is the one that most have."""
    ours = {}
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            head, _, rest = name.partition(".")
            if head == "body" and "lora_" not in rest:
                ours[f"{getattr(part, 'prefix', '')}{rest}"] = tensor
    prefix = max(PREFIXES, key=lambda each: sum(f"{each}{name}" in stored for name in ours))
    return {f"{prefix}{name}": tensor for name, tensor in ours.items()}


def _fault(stored: Stored, name: str, ours: Tensor) -> str | None:
    if name not in stored:
        return "missing"
    shape, kind = tuple(stored[name].get_shape()), stored[name].get_dtype()
    if shape != tuple(ours.shape):
        return f"{shape}, not {tuple(ours.shape)}"
    return None if kind in NUMBERS or not ours.is_floating_point() else f"of {kind}"


def _require_none(folder: Path, faults: Mapping[str, str | None]) -> None:
    found = [f"{name} ({fault})" for name, fault in faults.items() if fault]
    fix = AGAIN
    if len(found) == 1 and found[0].endswith(f"{MASK} (missing)"):  # trained without masks
        fix = "Pass --mask_time_prob=0, or take a model that was trained with masks."
    if found:
        raise SbkitError(
            f"The weights in {folder} must have every tensor of the encoder that its config.json "
            f"describes, but {len(found)} are missing or others: "
            f"{listed(found, max_names=SHOWN)}. {fix}"
        )

"""The folder of a pretrained encoder, as `save_pretrained` or a download from a hub leaves it.

Its files are read as data. Nothing in it is executed, and no connection is opened.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading

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
        return {**json.loads(read_regular(file, largest=LARGEST, what=f"The {name}"))}


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

"""The folder of a pretrained encoder, as `save_pretrained` or a download from a hub leaves it.

Its files are read as data. Nothing in it is executed, and no connection is opened.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LARGEST = 1 << 25  # bytes of a JSON file or of a model card
AGAIN = "Download it again."


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


def name_of(folder: Path) -> str:
    """Return the id of a model in the hub's cache, else the name of its folder."""
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def file_in(folder: Path, name: str) -> Path | None:
    """Return where a file of the folder lies, or None; the hub's cache links to its own blobs.

    Raises SbkitError for a link that leads elsewhere or nowhere, and for what is no file.
    """
    path = folder / name
    if not (path.is_symlink() or path.exists()):
        return None
    real, homes = path.resolve(), [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append(folder.parents[1].resolve() / "blobs")
    why = "" if real.is_file() else "is no file, or half a download"
    if not any(real.is_relative_to(home) for home in homes):
        why = f"leads out of it, to {real}"
    if why:
        raise SbkitError(f"{path} must be a file of its folder, but {why}. {AGAIN}")
    return real


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a file of settings, None where it is not there; raises SbkitError."""
    if (file := file_in(folder, name)) is None:
        return None
    with reading(folder / name):
        values = json.loads(read_regular(file, largest=LARGEST, what=f"The {name}"))
        if not isinstance(values, dict):
            raise ValueError("it is no object")
    return {str(key): value for key, value in values.items()}


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise SbkitError for a file that its reader cannot make sense of."""
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:  # json's, and those of safetensors, which has its own
        raise SbkitError(
            f"{file} must be a whole file, but cannot be read ({error}). {AGAIN}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files of tensors: the one, or the shards that the index names; raises SbkitError.

    Pickles are refused: reading one runs what it holds.
    """
    if (file := file_in(folder, WEIGHTS)) is not None:
        return [file]
    if (index := read_json(folder, INDEX)) is not None:
        named = index.get("weight_map")
        names = sorted(map(str, named.values())) if isinstance(named, Mapping) else []
        return [_shard(folder, name) for name in dict.fromkeys(names)]
    came = next((f"only {name}" for name in PICKLES if (folder / name).exists()), "neither")
    raise SbkitError(
        f"{folder} must hold {WEIGHTS} or {INDEX}, but has {came}. Download them, or load the "
        "model with transformers, which you trust for it, and call its save_pretrained."
    )


def _shard(folder: Path, name: str) -> Path:
    file = file_in(folder, name) if name == Path(name).name else None
    if file is None:
        raise SbkitError(
            f"{folder} must hold every file that {INDEX} names, but has no {name}. {AGAIN}"
        )
    return file


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 of the file of tensors; of shards, that of their hashes in hexadecimal."""
    digests = []
    for file in weight_files(folder):
        with file.open("rb") as content:
            digests.append(hashlib.file_digest(content, "sha256").hexdigest())
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )

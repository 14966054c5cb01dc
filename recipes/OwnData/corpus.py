"""The corpus of manifests that the user names: a file or folder for each split.

manifest: {train: a.csv, dev: [b.tsv, c.tsv], test: {clean: d.jsonl, noisy: kaldi/noisy}}
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.data.corpus import ROLES, require_split_name, resolve_splits
from sbkit.data.manifest import Manifest
from sbkit.data.sources import (
    StreamedSplit,
    is_kaldi,
    is_saved_dataset,
    read_manifests,
    streamed_files,
)
from sbkit.text.languages import spoken_language

ROLE_NAMES = {"train": "train", "valid": "valid", "dev": "valid", "test": "test"}
EXAMPLE = "Write manifest: {train: a.csv, dev: b.csv, test: {clean: c.csv, noisy: d.csv}}."


def splits(knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else as ``manifest`` has them.

    Raises:
        SbkitError: ``manifest`` is no such mapping, or lacks what trains or validates.
    """
    files, roles = _read_mapping(knobs["manifest"])
    for role in ("train", "valid"):
        if not knobs.get("splits") and not roles[role]:
            raise SbkitError(
                f"`manifest` must name files to train on and to validate on, but has none for "
                f"{'dev' if role == 'valid' else role}. Add --manifest "
                f"{'dev' if role == 'valid' else role}=FILE."
            )
    return resolve_splits(knobs.get("splits"), roles, list(files))


def read(knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
    """Read the files of one split as one manifest, or find those that are streamed.

    Raises:
        SbkitError: a file cannot be read, or lacks the columns.
    """
    sources = _read_mapping(knobs["manifest"])[0][split]
    columns: dict[str, Any] = {
        "path_column": knobs.get("path_column"),
        "text_column": knobs.get("text_column"),
        "language": spoken_language(knobs["language"]),
    }
    for source in sources:
        if "://" not in source and not Path(source).exists():
            raise SbkitError(
                f"`manifest.{split}` must name a file or a folder, but there is no {source}. "
                "Check its path."
            )
    streamed = {source: streamed_files(source) for source in sources if _is_streamed(source)}
    if not streamed:
        return read_manifests([Path(source) for source in sources], **columns)
    for source in sources:
        if not streamed.get(source):
            raise SbkitError(
                "A split that is streamed must come from folders or URLs that hold parquet or "
                f"JSON Lines (.jsonl), but none is found at {source}. Correct it, see whether it "
                "can be reached, or name each file."
            )
    return StreamedSplit(tuple(chain.from_iterable(streamed.values())), **columns)


def _is_streamed(source: str) -> bool:
    """Return whether it is a URL, or a folder that is neither Kaldi's nor a saved dataset."""
    folder = Path(source)
    known = is_saved_dataset(folder) or is_kaldi(folder)
    return "://" in source or (folder.is_dir() and not known and bool(streamed_files(source)))


def _read_mapping(value: object) -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]]]:
    """Return the files of each split, and the splits of each role."""
    if not isinstance(value, Mapping) or not value:
        raise SbkitError(
            f"`manifest` must map the names of splits to files, but is {value!r}. {EXAMPLE}"
        )
    files: dict[str, tuple[str, ...]] = {}
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    for key, named in value.items():
        inner = named if isinstance(named, Mapping) else {str(key): named}
        for split, paths in inner.items():
            require_split_name(str(split))
            if split in files:
                raise SbkitError(
                    f"Each split of `manifest` must have a name of its own, but {split!r} comes "
                    "twice. Rename one of them."
                )
            files[str(split)] = _paths(str(split), paths)
            roles[_role(str(key))].append(str(split))
    return files, roles


def _role(name: str) -> str:
    """Return the role of a key of ``manifest``: of ``test-a``, test."""
    for begin, role in ROLE_NAMES.items():
        if name == begin or name.startswith((f"{begin}-", f"{begin}_", f"{begin}.")):
            return role
    raise SbkitError(
        "The names in `manifest` must be train, dev or test, or begin with one of them and a "
        f"hyphen, but {name!r} came. Write test-{name}, for example."
    )


def _paths(split: str, value: object) -> tuple[str, ...]:
    """Return absolute paths, and URLs as they are."""
    values: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(each, str | Path) and str(each) for each in values):
        raise SbkitError(
            f"`manifest.{split}` must be a file or a list of files, but is {value!r}. {EXAMPLE}"
        )
    return tuple(
        str(each) if "://" in str(each) else str(Path(str(each)).expanduser().absolute())
        for each in values
    )

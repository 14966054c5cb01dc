"""Read the manifests that the user names: files, folders or URLs for each split.

manifest: {train: a.csv, dev: [b.tsv, c.tsv], test: {clean: d.jsonl, noisy: kaldi/noisy}}
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.corpus import ROLES, KnobValues
from sbkit.data.manifest import Manifest
from sbkit.data.sources import (
    RemoteTables,
    is_arrow_dataset,
    is_kaldi,
    read_manifests,
    remote_tables,
)
from sbkit.data.tables import TableOptions
from sbkit.text.languages import single_language_tag

ROLE_OF = {"train": "train", "valid": "valid", "dev": "valid", "test": "test"}
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it becomes part of file names
EXAMPLE = "Write manifest: {train: a.csv, dev: b.csv, test: {clean: c.csv, noisy: d.csv}}."


class ParsedManifest(NamedTuple):
    """The key `manifest`, with a name for each split."""

    sources: dict[str, tuple[str, ...]]  # absolute paths or URLs by split
    splits: dict[str, list[str]]  # by role


def splits(knobs: KnobValues) -> Mapping[str, Sequence[str]]:
    """Return the splits of each role, as in ``manifest``."""
    by_role = _parse_manifest(knobs["manifest"]).splits
    for role, key in (("train", "train"), ("valid", "dev")):
        if not knobs.get("splits") and not by_role[role]:
            raise ConfigError(f"`manifest` has no files for {key}. Add --manifest {key}=FILE.")
    return by_role


def read(knobs: KnobValues, split: str) -> Manifest | RemoteTables:
    """Read the files of one split as one manifest, or return its remote tables."""
    sources = _parse_manifest(knobs["manifest"]).sources[split]
    for source in sources:
        if "://" not in source and not Path(source).exists():
            raise ConfigError(f"`manifest.{split}`: {source} does not exist. Check its path.")
    options = TableOptions.from_knobs(knobs, single_language_tag(knobs["language"]))
    remote = [source for source in sources if _is_remote(source)]
    if not remote:
        return read_manifests([Path(source) for source in sources], options)
    local = [source for source in sources if source not in remote]
    if local:
        raise DataError(
            f"`manifest.{split}` cannot mix remote tables, such as {remote[0]}, with other "
            f"sources, such as {local[0]}. Make two splits of them, or convert {local[0]} to "
            "parquet or JSON Lines (.jsonl) in a folder."
        )
    files: list[str] = []
    for source in remote:
        tables = remote_tables(source)
        if not tables:
            raise DataError(
                f"`manifest.{split}`: there is neither parquet nor JSON Lines (.jsonl) at "
                f"{source}. Correct it, check that it can be reached, or name each file."
            )
        files += tables
    return RemoteTables(tuple(files), options)


def _is_remote(source: str) -> bool:
    """Check whether a source is a URL, or a folder of tables."""
    if "://" in source:
        return True
    folder = Path(source)
    if not folder.is_dir() or is_arrow_dataset(folder) or is_kaldi(folder):
        return False
    return bool(remote_tables(source))


def _parse_manifest(manifest: object) -> ParsedManifest:
    if not isinstance(manifest, Mapping) or not manifest:
        raise ConfigError(
            f"`manifest` must map the names of splits to files, but is {manifest!r}. {EXAMPLE}"
        )
    sources: dict[str, tuple[str, ...]] = {}
    splits: dict[str, list[str]] = {role: [] for role in ROLES}
    for key, value in manifest.items():
        by_split = value if isinstance(value, Mapping) else {key: value}
        for name, paths in by_split.items():
            split = str(name)  # a YAML may also name it by a number
            if not SPLIT_NAME.fullmatch(split):
                raise ConfigError(
                    f"`manifest` names the split {split!r}, but names start with a letter or digit "
                    "and consist of letters, digits and . + - _. Rename it."
                )
            if split in sources:
                raise ConfigError(f"`manifest` names the split {split!r} twice. Rename one.")
            sources[split] = _absolute_paths(split, paths)
            splits[_role_of_key(str(key))].append(split)
    return ParsedManifest(sources, splits)


def _role_of_key(key: str) -> str:
    """Return the role of a key of ``manifest``, such as test for ``test-a``."""
    for prefix, role in ROLE_OF.items():
        if key == prefix or key.startswith((f"{prefix}-", f"{prefix}_", f"{prefix}.")):
            return role
    raise ConfigError(
        f"`manifest` has the key {key!r}, but a key is train, dev (or valid) or test, or starts "
        f"with one of them and a hyphen, an underscore or a period. Write test-{key}, for example."
    )


def _absolute_paths(split: str, value: object) -> tuple[str, ...]:
    """Make the paths of a split absolute; URLs stay as they are."""
    sources: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not sources or not all(isinstance(x, str | Path) and str(x) for x in sources):
        raise ConfigError(
            f"`manifest.{split}` must be a file or a list of files, but is {value!r}. {EXAMPLE}"
        )
    return tuple(_absolute_path(split, str(source)) for source in sources)


def _absolute_path(split: str, source: str) -> str:
    if "://" in source:
        return source
    try:
        return str(Path(source).expanduser().absolute())
    except RuntimeError as error:
        raise ConfigError(
            f"`manifest.{split}`: {source} begins with ~, but this machine has no such user. Write "
            "the whole path."
        ) from error

"""The corpus of manifests that the user names: files or folders for each split.

manifest: {train: a.csv, dev: [b.tsv, c.tsv], test: {clean: d.jsonl, noisy: kaldi/noisy}}
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.corpus import ROLES, KnobValues
from sbkit.data.manifest import Manifest
from sbkit.data.sources import (
    RemoteTables,
    is_kaldi,
    is_saved_dataset,
    read_manifests,
    remote_tables,
)
from sbkit.data.tables import TableOptions
from sbkit.text.languages import single_language_tag

ROLE_OF = {"train": "train", "valid": "valid", "dev": "valid", "test": "test"}
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it becomes part of file names
EXAMPLE = "Write manifest: {train: a.csv, dev: b.csv, test: {clean: c.csv, noisy: d.csv}}."


def splits(knobs: KnobValues) -> Mapping[str, Sequence[str]]:
    """Return the splits of each role, as in ``manifest``."""
    _, roles = _read_mapping(knobs["manifest"])
    for role, key in (("train", "train"), ("valid", "dev")):
        if not knobs.get("splits") and not roles[role]:
            raise ConfigError(f"`manifest` has no files for {key}. Add --manifest {key}=FILE.")
    return roles


def read(knobs: KnobValues, split: str) -> Manifest | RemoteTables:
    """Read the files of one split as one manifest, or return its remote tables."""
    sources = _read_mapping(knobs["manifest"])[0][split]
    for source in sources:
        if "://" not in source and not Path(source).exists():
            raise ConfigError(f"`manifest.{split}`: {source} does not exist. Check its path.")
    options = TableOptions.from_knobs(knobs, single_language_tag(knobs["language"]))
    tables = {source: remote_tables(source) for source in sources if _is_remote(source)}
    if not tables:
        return read_manifests([Path(source) for source in sources], options)
    for source in sources:
        if not tables.get(source):
            raise DataError(
                f"`manifest.{split}`: there is neither parquet nor JSON Lines (.jsonl) at "
                f"{source}, which other sources of the split have. Correct it, check that it can "
                "be reached, or name each file."
            )
    return RemoteTables(tuple(chain.from_iterable(tables.values())), options)


def _is_remote(source: str) -> bool:
    """Check whether a source is a URL, or a folder of tables."""
    folder = Path(source)
    is_dataset = is_saved_dataset(folder) or is_kaldi(folder)
    return "://" in source or (folder.is_dir() and not is_dataset and bool(remote_tables(source)))


def _read_mapping(manifest: object) -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]]]:
    """Return the files of each split, and the splits of each role."""
    if not isinstance(manifest, Mapping) or not manifest:
        raise ConfigError(
            f"`manifest` must map the names of splits to files, but is {manifest!r}. {EXAMPLE}"
        )
    files: dict[str, tuple[str, ...]] = {}
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    for key, value in manifest.items():
        by_split = value if isinstance(value, Mapping) else {str(key): value}
        for split, paths in by_split.items():
            if not SPLIT_NAME.fullmatch(str(split)):
                raise ConfigError(
                    f"`manifest` names the split {split!r}, but names start with a letter or digit "
                    "and consist of letters, digits and . + - _. Rename it."
                )
            if split in files:
                raise ConfigError(f"`manifest` names the split {split!r} twice. Rename one.")
            files[str(split)] = _paths(str(split), paths)
            roles[_role(str(key))].append(str(split))
    return files, roles


def _role(key: str) -> str:
    """Return the role of a key of ``manifest``, such as test for ``test-a``."""
    for prefix, role in ROLE_OF.items():
        if key == prefix or key.startswith((f"{prefix}-", f"{prefix}_", f"{prefix}.")):
            return role
    raise ConfigError(
        f"`manifest` has the key {key!r}, but keys are train, dev or test, or start with one of "
        f"them and a hyphen. Write test-{key}, for example."
    )


def _paths(split: str, value: object) -> tuple[str, ...]:
    """Make the paths of a split absolute; URLs stay as they are."""
    files: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not files or not all(isinstance(file, str | Path) and str(file) for file in files):
        raise ConfigError(
            f"`manifest.{split}` must be a file or a list of files, but is {value!r}. {EXAMPLE}"
        )
    return tuple(
        str(file) if "://" in str(file) else str(Path(str(file)).expanduser().absolute())
        for file in files
    )

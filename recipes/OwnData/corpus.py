"""Read the manifests that the user names: files, folders or URLs for each split.

manifest: {train: a.csv, dev: [b.tsv, c.tsv], test: {clean: d.jsonl, noisy: saved}}
manifest: {all: a.csv}                  has a column `split`, or is split by its speakers
manifest: {all: folder}                 has files or folders named train, dev (validation) and test
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from os.path import normpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.audio.io import AudioPart
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import listed
from sbkit.data.columns import (
    ROLE_OF,
    SPEAKER_COLUMNS,
    SPLIT_COLUMNS,
    find_columns,
    find_split_column,
    role_of,
)
from sbkit.data.corpus import (
    ROLES,
    USUAL_SPLITS,
    Corpus,
    Row,
    SettingValues,
    check_shares,
    deal_speakers,
)
from sbkit.data.manifest import Excluded, Manifest, part_name, to_texts
from sbkit.data.read_manifests import (
    TableFolders,
    find_metadata,
    find_splits,
    is_arrow_dataset,
    list_tables,
    read_manifests,
)
from sbkit.data.tables import COLUMN_KEYS, TableOptions, is_named, read_text_column
from sbkit.data.tars import TAR_SUFFIXES, expand_ranges
from sbkit.text.languages import single_language_tag

logger = logging.getLogger(__name__)

ALL_SPLITS = "all"  # the key of a table with the rows of all splits
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it becomes part of file names
EXAMPLE = "Write manifest: {train: a.csv, dev: b.csv, test: {clean: c.csv, noisy: d.csv}}."


class SplitSources(NamedTuple):
    """The files of a split."""

    key: str  # where the YAML names them, such as manifest.test.clean
    role: str
    sources: tuple[str, ...]  # absolute paths or URLs


class OwnData(Corpus):
    """The files of the key ``manifest``."""

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check for the key."""
        return bool(settings.get("manifest"))

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the splits of each role, as in ``manifest``."""
        _check_columns(self.settings)
        splits_by_role: dict[str, list[str]] = {role: [] for role in ROLES}
        for split, (split_key, role, sources) in _parse_manifest(self.settings["manifest"]).items():
            if split == ALL_SPLITS:
                for name in dict.fromkeys(_read_all(self.settings)[1]):
                    splits_by_role[_role_of_key(name)].append(name)
            else:
                splits_by_role[role].append(split)
            for source in sources:
                tables = find_splits(source)
                if len(tables) > 1:
                    raise DataError(
                        f"`{split_key}`: {source} has files for {', '.join(sorted(tables))}. Write "
                        f"`manifest: {{{ALL_SPLITS}: {source}}}`, or a list of files."
                    )
        are_chosen = self.settings.get("splits") or ALL_SPLITS in self.settings["manifest"]
        for role, key in (("train", "train"), ("valid", "dev")):
            if not are_chosen and not splits_by_role[role]:
                raise ConfigError(
                    f"`manifest` has no files for {key}. Add `{key}: FILE`, or rows to `corpus`."
                )
        return splits_by_role

    def files(self) -> list[Path] | None:
        """Return the sources, for `prepared_splits`; None if some are not on this machine."""
        sources = _list_sources(self.settings["manifest"])
        if any("://" in source for source in sources):
            return None
        return [find_metadata(Path(source)) or Path(source) for source in sources]

    def read(self, split: str) -> Iterator[Row]:
        """Read the files of one split as one manifest, or return its table folders."""
        sources_by_split = _parse_manifest(self.settings["manifest"])
        if split in sources_by_split:
            source = _read_sources(self.settings, sources_by_split[split])
            yield from source.blocks() if isinstance(source, Manifest) else [source]
            return
        manifest, split_of_row = _read_all(self.settings)
        excluded = manifest.excluded if _role_of_key(split) == "train" else ()  # of no split
        columns = manifest.rows.column_names
        has_splits = find_columns(columns, None, SPLIT_COLUMNS)
        if split == "train" and "speaker" not in columns and not has_splits:
            logger.info(
                f"note: `manifest.{ALL_SPLITS}` names no speakers, so one may be in several splits."
                f" Name their column as one of {', '.join(SPEAKER_COLUMNS)}."
            )
        rows = np.flatnonzero(np.array(split_of_row) == split)
        yield from replace(manifest.take(rows), excluded=excluded).blocks()


def _list_sources(manifest: Mapping[str, Any]) -> list[str]:
    return [source for split in _parse_manifest(manifest).values() for source in split.sources]


def _check_columns(settings: SettingValues) -> None:
    mappings = {key: settings[key] for key in COLUMN_KEYS if isinstance(settings.get(key), Mapping)}
    sources = _list_sources(settings["manifest"])
    for column, mapping in mappings.items():
        for table in mapping:
            if not any(is_named(source, table) for source in sources):
                raise ConfigError(
                    f"`{column}` names the table {table}, but `manifest` has {listed(sources)}."
                )


def _read_all(settings: SettingValues) -> tuple[Manifest, list[str]]:
    """Return the rows to split, and the split of each: that of its column or its speaker."""
    sources_by_split = _parse_manifest(settings["manifest"])
    sources = sources_by_split[ALL_SPLITS]
    manifest = _read_sources(settings, sources)
    if isinstance(manifest, TableFolders):
        raise DataError(
            f"`manifest.{ALL_SPLITS}` is a table folder, a tar or a URL. Name one for each split."
        )
    rows = manifest.rows
    column = find_split_column(rows.column_names, partial(read_text_column, rows))
    if column is None:
        paths = map(Path, sources.sources)
        folders = [path if path.is_dir() else path.parent for path in paths]
        spellings = {*map(str, folders), *map(normpath, folders)}
        # A row without a speaker is one of its own.
        speakers = [
            speaker or f"clip {_name_clip(part, spellings)}"
            for speaker, part in zip(read_text_column(rows, "speaker"), manifest.parts, strict=True)
        ]
        shares = check_shares(settings.get("split_shares"))
        shares = {name: share for name, share in shares.items() if name not in sources_by_split}
        split_of = deal_speakers({*speakers}, shares, sources.sources[0])
        return manifest, [split_of[speaker] for speaker in speakers]
    splits = [split.strip().lower() for split in read_text_column(rows, column)]
    for split in {*splits}:
        if split and role_of(split) is None:
            raise DataError(
                f"{sources.sources[0]}: the column {column} has the value {split!r}, but values "
                f"start with one of {', '.join(ROLE_OF)}, such as test-noisy."
            )
    is_empty = np.array([not split for split in splits])
    lost = [
        Excluded(id, "no split", f"its field {column} is empty")
        for id in to_texts(manifest.take(np.flatnonzero(is_empty)).rows["id"])
    ]
    manifest = manifest.take(np.flatnonzero(~is_empty))
    manifest = replace(manifest, excluded=(*manifest.excluded, *lost))
    return manifest, [split for split in splits if split]


def _name_clip(part: AudioPart, folders: Set[str]) -> str:
    """Name a clip by its file and folder, as its id changes once another clip has the same."""
    folder, _, file = part.path.rpartition("/")
    name = part_name(file.rpartition(".")[0] or file, part)
    return name if folder in folders else f"{folder.rpartition('/')[2]}/{name}"


def _read_sources(settings: SettingValues, split_sources: SplitSources) -> Manifest | TableFolders:
    key, _, sources = split_sources
    for source in sources:
        if "://" not in source and not Path(source).exists():
            raise ConfigError(f"`{key}`: {source} does not exist.")
    language = single_language_tag(settings["language"])
    options = [TableOptions.from_settings(settings, language, source) for source in sources]
    table_folders = [source for source in sources if _is_table_folder(source)]
    if not table_folders:
        return read_manifests([*zip(map(Path, sources), options, strict=True)])
    other_sources = [source for source in sources if source not in table_folders]
    if other_sources:
        raise DataError(
            f"`{key}` cannot mix table folders, tars and URLs, such as {table_folders[0]}, with "
            f"other sources, such as {other_sources[0]}. Make two splits of them."
        )
    files: list[str] = []
    for folder in table_folders:
        tables = list_tables(folder)
        if not tables:
            raise DataError(
                f"`{key}`: {folder} has neither tars nor parquet or JSON Lines (.jsonl) files."
            )
        files += tables
    return TableFolders(tuple(files), options[0])


def _is_table_folder(source: str) -> bool:
    """Check whether a source is a folder of tables; a tar and a URL always count as one."""
    if "://" in source or source.endswith(TAR_SUFFIXES):
        return True
    folder = Path(source)
    is_one_table = is_arrow_dataset(folder) or find_metadata(folder)
    return folder.is_dir() and not is_one_table and bool(list_tables(source))


def _parse_manifest(manifest: Mapping[str, Any]) -> dict[str, SplitSources]:
    """Return the files of each split of the key `manifest`; ``all`` has those to be split."""
    if ALL_SPLITS in manifest:
        if {*manifest} != {ALL_SPLITS}:
            raise ConfigError(f"`manifest` has `{ALL_SPLITS}` and other keys. {EXAMPLE}")
        key = f"manifest.{ALL_SPLITS}"
        sources = _absolute_paths(key, manifest[ALL_SPLITS])
        named = find_splits(sources[0]) if len(sources) == 1 else {}
        files: Mapping[str, Sequence[str]] = named or {"train": sources}
        splits = {role: split for role, (split,) in USUAL_SPLITS.items() if role in files}
        if len(splits) < len(ROLES) and "train" in splits:
            splits["train"] = ALL_SPLITS  # the others are dealt out of it
        return {split: SplitSources(key, role, (*files[role],)) for role, split in splits.items()}
    sources_by_split: dict[str, SplitSources] = {}
    for key, value in manifest.items():
        is_nested = isinstance(value, Mapping)
        paths_by_name = value if is_nested else {key: value}
        for name, paths in paths_by_name.items():
            split = str(name)  # a YAML may also name it by a number
            if not SPLIT_NAME.fullmatch(split):
                raise ConfigError(
                    f"`manifest` names the split {split!r}, but names start with a letter or digit "
                    "and consist of letters, digits and . + - _."
                )
            if split in sources_by_split:
                raise ConfigError(f"`manifest` names the split {split!r} twice.")
            split_key = f"manifest.{key}.{split}" if is_nested else f"manifest.{split}"
            sources_by_split[split] = SplitSources(
                split_key, _role_of_key(str(key)), _absolute_paths(split_key, paths)
            )
    return sources_by_split


def _role_of_key(key: str) -> str:
    """Return the role of a key of ``manifest``, such as test for ``test-a``."""
    role = role_of(key)
    if role is None:
        raise ConfigError(
            f"`manifest` has the key {key!r}, but keys start with train, dev, valid or test. Write "
            f"test-{key}, for example."
        )
    return role


def _absolute_paths(key: str, value: object) -> tuple[str, ...]:
    sources: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if not sources or not all(isinstance(x, str | Path) and str(x) for x in sources):
        raise ConfigError(f"`{key}` must be a file or a list of files, but is {value!r}. {EXAMPLE}")
    paths: list[str] = []
    for name in chain.from_iterable(expand_ranges(str(source)) for source in sources):
        try:
            paths.append(name if "://" in name else str(Path(name).expanduser().absolute()))
        except RuntimeError as error:
            raise ConfigError(
                f"`{key}`: {name} begins with ~, but this machine has no such user."
            ) from error
    return tuple(paths)

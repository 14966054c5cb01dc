"""Read the tables, folders and URLs that the user names for each split, and annotated recordings.

manifest: {train: a.csv, dev: [b.tsv, c.tsv], test: {clean: d.jsonl, noisy: s3://lake/noisy}}
manifest: {all: a.csv}                  has a column `split`, or is split by its speakers
manifest: {all: folder}                 has files or folders named train, dev (validation) and test
data_folder: folder                     of .eaf or .TextGrid files is the same
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from os.path import normpath
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.audio.io import AudioSpan
from sbkit.base.errors import ConfigError, DataError, concerning
from sbkit.base.messages import listed
from sbkit.data.annotations import is_annotation_file
from sbkit.data.audio_tables import AudioTable, is_tar
from sbkit.data.columns import ROLE_OF, find_split_column, role_of
from sbkit.data.corpus import (
    ROLES,
    USUAL_SPLITS,
    Corpus,
    CorpusRow,
    SettingValues,
    deal_speakers,
    named_folder,
    parse_split_shares,
)
from sbkit.data.manifest import Excluded, Manifest, span_name
from sbkit.data.read_manifests import (
    SourceFile,
    choose_files,
    find_files,
    find_splits,
    read_files,
)
from sbkit.data.tables import CLIPS_FOLDER, TableOptions, is_named, read_text_column
from sbkit.text.languages import single_language_tag

logger = logging.getLogger(__name__)

ALL_SPLITS = "all"  # the key of a table with the rows of all splits
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it becomes part of file names
NO_SPLIT = "no split", "its field is empty"  # a reason, and its detail
EXAMPLE = "Write manifest: {train: a.csv, dev: b.csv, test: {clean: c.csv, noisy: d.csv}}."


# Rows of all splits, and the split of each.
DealtRows = tuple[Manifest | AudioTable, npt.NDArray[np.str_]]


@dataclass(frozen=True)
class Split:
    """The sources of a split, as paths or URLs, and their files."""

    role: str
    sources: Sequence[str]
    files: Sequence[SourceFile]


class OwnData(Corpus):
    """The files of the key ``manifest``, or a folder of annotated recordings."""

    layout = "a folder of .eaf or .TextGrid files"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check for ``manifest``, or for a data folder with annotations, also one level below."""
        if settings["manifest"]:
            return True
        folder = named_folder(settings)
        if folder is None or not folder.is_dir():
            return False
        entries = [*folder.iterdir()]
        # The folder of all clips of Common Voice takes seconds to list.
        folders = (entry for entry in entries if entry.is_dir() and entry.name != CLIPS_FOLDER)
        files = chain(entries, chain.from_iterable(inner.iterdir() for inner in folders))
        return any(is_annotation_file(file.name) for file in files)

    def _manifest(self) -> Mapping[str, Any]:
        return self.settings["manifest"] or {ALL_SPLITS: str(named_folder(self.settings))}

    def _options(self, source: str) -> TableOptions:
        language = single_language_tag(self.settings["language"])
        options = TableOptions.from_settings(self.settings, language, source)
        return options if self.settings["manifest"] else replace(options, data_root=None)

    def splits(self) -> Mapping[str, Sequence[str]]:
        roles = {name: split.role for name, split in self._splits.items()}
        if roles.pop(ALL_SPLITS, None):
            names = {*chain.from_iterable(np.unique(names).tolist() for _, names in self._dealt)}
            roles |= {name: _role_of_key(name) for name in sorted(names - {""})}
        for name in roles:
            if not SPLIT_NAME.fullmatch(name):
                raise ConfigError(
                    f"`manifest` has the split {name!r}, but names start with a letter or digit "
                    "and consist of letters, digits and . + - _."
                )
        are_chosen = self.settings["splits"] or ALL_SPLITS in self._manifest()
        for role, key in (("train", "train"), ("valid", "dev")):
            if not are_chosen and role not in roles.values():
                raise ConfigError(
                    f"`manifest` has no files for {key}. Add `{key}: FILE`, or rows to `corpus`."
                )
        return {role: [name for name in roles if roles[name] == role] for role in ROLES}

    def state(self) -> object:
        """Return the names and versions of the files, here or at URLs."""
        files = chain.from_iterable(split.files for split in self._splits.values())
        return [[file.path, file.version] for file in files]

    def read(self, split: str) -> Iterator[CorpusRow]:
        """Yield the rows of tables in blocks, and the files with audio inside."""
        if split in self._splits:
            for rows in self._read(self._splits[split]):
                yield from rows.blocks() if isinstance(rows, Manifest) else [rows]
            return
        is_train = _role_of_key(split) == "train"
        for rows, names in self._dealt:
            chosen = names == split
            if isinstance(rows, Manifest):
                excluded = rows.excluded if is_train else ()
                yield from replace(rows.filter(chosen), excluded=excluded).blocks()
            else:
                yield replace(rows, rows=(1 + np.flatnonzero(chosen)).tolist())

    def _read(self, split: Split) -> list[Manifest | AudioTable]:
        return read_files([(file, self._options(file.path)) for file in split.files])

    @cached_property
    def _splits(self) -> dict[str, Split]:
        """The sources of each split, listed once; ``all`` has those to be split."""
        splits = _parse_manifest(self._manifest())
        files = [file.path for split in splits.values() for file in split.files]
        columns = self.settings["columns"] or {}
        encoding = self.settings["encoding"]
        names = {
            "columns": [name for name, value in columns.items() if isinstance(value, Mapping)],
            "encoding": [*encoding] if isinstance(encoding, Mapping) else [],
        }
        for key, table in ((key, table) for key, tables in names.items() for table in tables):
            if not any(is_named(file, table) for file in files):
                raise ConfigError(
                    f"`{key}` names the table {table}, but `manifest` has {listed(files)}."
                )
        return splits

    @cached_property
    def _dealt(self) -> list[DealtRows]:
        """The rows to split, and the split of each: that of its column or its speaker."""
        split = self._splits[ALL_SPLITS]
        source = split.sources[0]
        if tars := [file.path for file in split.files if is_tar(file.name)]:
            raise DataError(
                f"`manifest.{ALL_SPLITS}`: {tars[0]} is a tar, so all of it is read to know its "
                "rows. Name tars for each split."
            )
        blocks = self._read(split)
        tables = [block.rows if isinstance(block, Manifest) else block.texts() for block in blocks]
        columns = [self._find_split_column(table) for table in tables]
        if any(columns):
            named = zip(tables, columns, strict=True)
            splits = [_read_splits(table, column, source) for table, column in named]
            lost = [
                Excluded(row, *NO_SPLIT)
                for block, names in zip(blocks, splits, strict=True)
                for row, name in zip(_name_rows(block, len(names)), names, strict=True)
                if not name
            ]
            return [(Manifest.of(lost), np.array([], str)), *zip(blocks, splits, strict=True)]
        speakers = [self._name_speakers(*named) for named in zip(blocks, tables, strict=True)]
        shares = parse_split_shares(self.settings["split_shares"])
        shares = {name: share for name, share in shares.items() if name not in self._splits}
        split_of = deal_speakers({*chain(*speakers)}, shares, source)
        splits = [np.array([split_of[name] for name in names]) for names in speakers]
        return [*zip(blocks, splits, strict=True)]

    def _find_split_column(self, table: pa.Table) -> str | None:
        options = TableOptions.from_settings({"columns": self.settings["columns"]})
        if "split" in options.columns:
            return options.find(table.column_names, "split", "`manifest`") or None
        return find_split_column(table.column_names, partial(read_text_column, table))

    def _name_speakers(self, block: Manifest | AudioTable, table: pa.Table) -> list[str]:
        """Return the speaker of each row; one without a speaker is one of its own."""
        column = "speaker"
        if isinstance(block, AudioTable):
            column = block.options.find(table.column_names, column, block.file)
        if column not in table.column_names:
            logger.info(
                f"note: `manifest.{ALL_SPLITS}` names no speakers, so one may be in several splits."
                " Name their column by `columns: {speaker: COLUMN}`."
            )
        if isinstance(block, AudioTable):
            clips = _name_rows(block, len(table))
        else:
            folders = {Path(file.path).parent for file in self._splits[ALL_SPLITS].files}
            spellings = {*map(str, folders), *map(normpath, folders)}
            clips = [_name_clip(clip, spellings) for clip in block.spans]
        named = zip(read_text_column(table, column), clips, strict=True)
        return [speaker or f"clip {clip}" for speaker, clip in named]


def _name_rows(block: Manifest | AudioTable, count: int) -> list[str]:
    if isinstance(block, Manifest):
        return block.ids
    return [f"{Path(block.file).name} row {number + 1}" for number in range(count)]


def _read_splits(table: pa.Table, column: str | None, source: str) -> npt.NDArray[np.str_]:
    splits = [split.strip().lower() for split in read_text_column(table, column or "")]
    for split in {*splits} - {""}:
        if role_of(split) is None:
            raise DataError(
                f"{source}: the column {column} has the value {split!r}, but values start with one "
                f"of {', '.join(ROLE_OF)}, such as test-noisy."
            )
    return np.array(splits, str)


def _name_clip(span: AudioSpan, folders: Set[str]) -> str:
    """Name a clip by its file and folder, as its id changes once another clip has the same."""
    folder, _, file = span.path.rpartition("/")
    name = span_name(file.rpartition(".")[0] or file, span)
    return name if folder in folders else f"{folder.rpartition('/')[2]}/{name}"


def _parse_manifest(manifest: Mapping[str, Any]) -> dict[str, Split]:
    """Return the files of each split of the key `manifest`; ``all`` has those to be split."""
    if ALL_SPLITS in manifest:
        if len(manifest) > 1:
            raise ConfigError(f"`manifest` has `{ALL_SPLITS}` and other keys. {EXAMPLE}")
        named = _find_sources(f"manifest.{ALL_SPLITS}", "", manifest[ALL_SPLITS])
        by_role = find_splits(named.sources[0], named.files) if len(named.sources) == 1 else {}
        by_role = by_role or {"train": choose_files(named.files)}
        names = {role: split for role, (split,) in USUAL_SPLITS.items() if role in by_role}
        if len(names) < len(ROLES) and "train" in names:
            names["train"] = ALL_SPLITS  # the others are dealt out of it
        return {split: replace(named, role=r, files=by_role[r]) for r, split in names.items()}
    splits: dict[str, Split] = {}
    for key, value in manifest.items():
        is_nested = isinstance(value, Mapping)
        paths_by_name = value if is_nested else {key: value}
        for name, paths in paths_by_name.items():
            split = str(name)  # a YAML may also name it by a number
            if split in splits:
                raise ConfigError(f"`manifest` names the split {split!r} twice.")
            split_key = f"manifest.{key}.{split}" if is_nested else f"manifest.{split}"
            splits[split] = _find_sources(split_key, _role_of_key(str(key)), paths)
    return splits


def _find_sources(key: str, role: str, value: object) -> Split:
    """Return the sources that a key of the YAML names. The role of ``all`` is ""."""
    with concerning(*key.split(".")):
        values: Sequence[object] = value if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(x, str | Path) and str(x) for x in values):
            raise ConfigError(
                f"`{key}` must be a file or a list of files, but is {value!r}. {EXAMPLE}"
            )
        names = map(str, values)
        sources = [x if "://" in x else str(Path(x).expanduser().absolute()) for x in names]
        files: list[SourceFile] = []
        for source in sources:
            if "://" not in source and not Path(source).exists():
                raise ConfigError(f"`{key}`: {source} does not exist.")
            source_files = find_files(source)
            by_role = find_splits(source, source_files) if role else {}
            if len(by_role) > 1:
                raise DataError(
                    f"`{key}`: {source} has files for {', '.join(sorted(by_role))}. Write "
                    f"`manifest: {{{ALL_SPLITS}: {source}}}`, or a list of files."
                )
            files += choose_files(source_files) if role else source_files
    return Split(role, sources, files)


def _role_of_key(key: str) -> str:
    """Return the role of a key of ``manifest``, such as test for ``test-a``."""
    role = role_of(key)
    if role is None:
        raise ConfigError(
            f"`manifest` has the key {key!r}, but keys start with train, dev, valid or test. Write "
            f"test-{key}, for example."
        )
    return role

"""The corpus of a Common Voice release (`sbkit.data.common_voice`), or of a folder of its form."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.base.messages import note_once
from sbkit.data.cache import unpack_corpus
from sbkit.data.common_voice import (
    TABLE_NAME,
    UNASSIGNED,
    find_table,
    read_releases,
    read_spontaneous,
)
from sbkit.data.corpus import (
    JOINED_FOLDERS,
    RELEASE_SPLITS,
    USUAL_SPLITS,
    Corpus,
    SettingValues,
    check_shares,
    deal_speakers,
    named_folder,
    resolve_splits,
    to_names,
)
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions, read_lines, read_text_column
from sbkit.text.languages import check_language, language_tags

# Tables that do not list clips.
OTHER_TABLES = {"clip_durations", "reported", "validated_sentences", "unvalidated_sentences"}
VALIDATED = "validated"  # has the rows of train, dev and test, and others
DATASHEET = "README.md"  # https://github.com/common-voice/cv-datasheets
_TITLE = re.compile(
    r"This datasheet is for (\S+) of the (Mozilla Common Voice [*\w ]+?) dataset for (.+?) \["
)
_LICENSE = re.compile(r"^#+ Licen[cs]e\s+(.+?)\s*(?:^#|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(")


class CommonVoice(Corpus):
    """A release of Common Voice."""

    layout = "a release of Common Voice"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder has TSVs or ``clips/``, itself or in the folder of a language."""
        folder = named_folder(settings)
        patterns = ("*.tsv", "clips", "*/clips", f"*/{TABLE_NAME.format('*')}")
        return folder is not None and any(any(folder.glob(pattern)) for pattern in patterns)

    def splits(self) -> Mapping[str, tuple[str, ...]]:
        """Return the splits of each role: the key ``splits``, else train, dev and test."""
        if _find_spontaneous(self.settings):
            available = [*RELEASE_SPLITS, UNASSIGNED]
            return resolve_splits(self.settings.get("splits"), USUAL_SPLITS, available)
        if not self.settings.get("splits"):
            _find_releases(self.settings, *chain.from_iterable(USUAL_SPLITS.values()))
            return USUAL_SPLITS
        names = [_split_names(release) for release in _find_releases(self.settings).values()]
        return resolve_splits(
            self.settings["splits"], USUAL_SPLITS, sorted(set.intersection(*names))
        )

    def files(self) -> list[Path]:
        """Return the folders of the tables, for `sbkit.data.prepared_splits`."""
        folders = [table.parent for table in _find_spontaneous(self.settings).values()]
        return folders or [*_find_releases(self.settings).values()]

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split; training on ``validated`` leaves out its rows that are in dev or test."""
        settings = self.settings
        options = TableOptions.from_settings(settings)
        if tables := _find_spontaneous(settings):
            folders = settings.get(JOINED_FOLDERS) or [settings["data_folder"]]
            run_tables = [
                table
                for folder in folders
                for table in _find_spontaneous({**settings, "data_folder": folder}).values()
            ]
            parts = []
            for tag, table in tables.items():
                beside = [other for other in run_tables if other != table]
                own_options = replace(options, language=tag)
                parts.append((tag, read_spontaneous(table, split, own_options, beside)))
            manifest = Manifest.join_named(parts, *(table.parent for table in tables.values()))
            return manifest.blocks()
        releases = _find_releases(settings, split)
        chosen = settings.get("splits") or {}
        train = to_names(chosen.get("train") or RELEASE_SPLITS[0])
        valid = to_names(chosen.get("valid") or RELEASE_SPLITS[1])
        release = next(iter(releases.values()))
        is_empty = all(_has_no_rows(release / f"{name}.tsv") for name in RELEASE_SPLITS[1:])
        has_one = len(train) == len(releases) == 1 and split in (*train, *RELEASE_SPLITS[1:])
        if is_empty and has_one and RELEASE_SPLITS[1] in valid:
            note_once(
                f"note: dev and test of {release} are empty: speakers of {train[0]} are dealt."
            )
            manifest = Manifest.join(read_releases(releases, train[0], options))
            named = zip(read_text_column(manifest.rows, "speaker"), manifest.ids, strict=True)
            speakers = [speaker or f"clip {id}" for speaker, id in named]
            split_of = deal_speakers(
                {*speakers}, check_shares(settings.get("split_shares")), release
            )
            name = "train" if split in train else split
            dealt = manifest.filter(np.array([split_of[speaker] == name for speaker in speakers]))
            return (dealt if split in train else Manifest(dealt.rows)).blocks()
        blocks = read_releases(releases, split, options)
        if split == VALIDATED and split in train:
            return _without_evaluation(blocks, releases, options)
        return blocks

    def about(self) -> Mapping[str, str]:
        """Return the names and the licenses that the datasheets state, for a model card."""
        try:
            folders = self.files()
        except SbkitError:  # `read` raises it again
            return {}
        names: list[str] = []
        licenses: list[str] = []
        for sheet in (folder / DATASHEET for folder in folders if (folder / DATASHEET).is_file()):
            text = sheet.read_text(encoding="utf-8", errors="replace")
            if title := _TITLE.search(text):
                names.append(f"{title[2].replace('*', '')}, {title[3]} ({title[1]})")
            if section := _LICENSE.search(text):
                link = _LINK.search(section[1])
                licenses.append(" ".join((link or section)[1].split()))
        return {"name": " and ".join(names), "license": " and ".join(dict.fromkeys(licenses))}


def _has_no_rows(table: Path) -> bool:
    """Check whether a table has a header only, as in a small language."""
    return table.is_file() and len([*islice(filter(str.strip, read_lines(table)), 2)]) < 2


def _without_evaluation(
    blocks: Iterator[Manifest], releases: Mapping[str, Path], options: TableOptions
) -> Iterator[Manifest]:
    """Leave out the rows whose clips are in dev or test, and count them."""
    paths = [
        chunk
        for tag, release in releases.items()
        for name in ("dev", "test")
        if (release / f"{name}.tsv").is_file()
        for block in read_releases({tag: release}, name, options)
        for chunk in block.rows["audio"].chunks
    ]
    evaluated = pa.chunked_array(paths, "binary")
    for block in blocks:
        is_evaluated = pc.is_in(block.rows["audio"], value_set=evaluated).to_numpy()
        filtered = {"also in dev or test": int(is_evaluated.sum())}
        yield replace(block.filter(~is_evaluated), filtered=filtered)


def _find_spontaneous(settings: SettingValues) -> dict[str, Path]:
    """Return the table of each language; {} for a release of Scripted Speech."""
    folder = unpack_corpus(settings.get("data_folder"))
    all_tables = sorted(folder.glob(TABLE_NAME.format("*")))
    tags = language_tags(settings.get("language"))
    tables = {tag: find_table(folder, tag) for tag in tags}
    missing = [tag for tag, table in tables.items() if table is None]
    if missing and (all_tables or len(missing) < len(tags)):
        present = ", ".join(table.name for table in all_tables) or "tables of other languages"
        raise DataError(
            f"data_folder: {folder} has no {TABLE_NAME.format(missing[0])}, but {present}. Set "
            "`language` to the one in its name."
        )
    return {tag: table for tag, table in tables.items() if table is not None}


def _find_releases(settings: SettingValues, *splits: str) -> dict[str, Path]:
    folder, tags = settings["data_folder"], language_tags(settings["language"])
    releases = {tag: _find_release(folder, tag, splits) for tag in tags}
    if len(set(releases.values())) < len(releases):
        raise ConfigError(
            f"`language` names {', '.join(releases)}, but {folder} is of one language."
        )
    return releases


def _find_release(data_folder: str | Path | None, language: str, splits: Sequence[str]) -> Path:
    """Return the folder with the TSVs: ``data_folder``, or the folder of the language in it."""
    check_language(language)  # it becomes the name of a folder
    tsvs = ", ".join(f"{split}.tsv" for split in splits or RELEASE_SPLITS)
    advice = f"Name the folder of a Common Voice release, with {tsvs} and clips/."
    release = unpack_corpus(data_folder)
    if not release.is_dir():
        raise DataError(f"data_folder: {release} is not a folder. {advice}")
    if not any(release.glob("*.tsv")) and (release / language).is_dir():
        release /= language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        if available := _split_names(release):  # a delta release has no train, dev or test
            names = ", ".join(sorted(available))
            advice += f" Or choose among its splits, {names}, with `splits`."
        raise DataError(f"data_folder: {release} has no {', '.join(missing)}. {advice}")
    return release


def _split_names(release: Path) -> set[str]:
    return {tsv.stem for tsv in release.glob("*.tsv")} - OTHER_TABLES

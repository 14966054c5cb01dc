"""The corpus of a Common Voice release (`sbkit.data.common_voice`), or of a folder of its form."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
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
    """Scripted or Spontaneous Speech, in one language or several."""

    layout = "a release of Common Voice, with TSVs and clips/"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check for clips/ or a table of Spontaneous Speech, also in the folder of a language."""
        folder = named_folder(settings)
        names = ("clips", TABLE_NAME.format("*"))
        patterns = [*names, *(f"*/{name}" for name in names)]
        return folder is not None and any(any(folder.glob(pattern)) for pattern in patterns)

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return those of train, dev and test that are there: a delta has none."""
        available = self.available()
        usual = USUAL_SPLITS.items()
        return {role: [split for split in splits if split in available] for role, splits in usual}

    def available(self) -> list[str]:
        if self._find_tables():
            return [*RELEASE_SPLITS, UNASSIGNED]
        names = [_split_names(release) for release in self._find_releases().values()]
        return sorted(set.intersection(*names))

    def files(self) -> list[Path]:
        """Return the folders of the tables."""
        folders = [table.parent for table in self._find_tables().values()]
        return folders or [*self._find_releases().values()]

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split; training on ``validated`` leaves out its rows that are in dev or test."""
        options = TableOptions.from_settings(self.settings)
        if tables := self._find_tables():
            return self._read_tables(tables, split, options).blocks()
        releases = self._find_releases()
        chosen = self.settings.get("splits") or {}
        train = to_names(chosen.get("train") or RELEASE_SPLITS[0])
        valid = to_names(chosen.get("valid") or RELEASE_SPLITS[1])
        release = next(iter(releases.values()))
        has_one = len(train) == len(releases) == 1 and split in (*train, *RELEASE_SPLITS[1:])
        if has_one and RELEASE_SPLITS[1] in valid and _has_empty_evaluation(release):
            return self._deal(releases, train[0], split, options).blocks()
        blocks = read_releases(releases, split, options)
        if split == VALIDATED and split in train:
            return _without_evaluation(blocks, releases, options)
        return blocks

    def _read_tables(
        self, tables: Mapping[str, Path], split: str, options: TableOptions
    ) -> Manifest:
        folders = self.settings.get(JOINED_FOLDERS) or [self.settings["data_folder"]]
        joined = [CommonVoice({**self.settings, "data_folder": folder}) for folder in folders]
        run_tables = [table for corpus in joined for table in corpus._find_tables().values()]
        parts = [
            (tag, read_spontaneous(table, split, replace(options, language=tag), run_tables))
            for tag, table in tables.items()
        ]
        return Manifest.join_named(parts, *(table.parent for table in tables.values()))

    def _deal(
        self, releases: Mapping[str, Path], train: str, split: str, options: TableOptions
    ) -> Manifest:
        """Deal the speakers of the training split to dev and test, which are empty."""
        (release,) = releases.values()
        note_once(f"note: dev and test of {release} are empty: speakers of {train} are dealt.")
        manifest = Manifest.join(read_releases(releases, train, options))
        named = zip(read_text_column(manifest.rows, "speaker"), manifest.ids, strict=True)
        speakers = [speaker or f"clip {id}" for speaker, id in named]
        shares = check_shares(self.settings.get("split_shares"))
        split_of = deal_speakers({*speakers}, shares, release)
        name = RELEASE_SPLITS[0] if split == train else split
        dealt = manifest.filter(np.array([split_of[speaker] == name for speaker in speakers]))
        return dealt if split == train else Manifest(dealt.rows)

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

    def _find_tables(self) -> dict[str, Path]:
        """Return the table of each language; {} for a release of Scripted Speech."""
        folder = unpack_corpus(self.settings.get("data_folder"))
        tags = language_tags(self.settings.get("language"))
        tables = {tag: table for tag in tags if (table := find_table(folder, tag))}
        names = [table.name for table in sorted(folder.glob(TABLE_NAME.format("*")))]
        if len(tables) < len(tags) and (names or tables):
            missing = TABLE_NAME.format(next(tag for tag in tags if tag not in tables))
            raise DataError(
                f"data_folder: {folder} has no {missing}, but "
                f"{', '.join(names) or 'tables of other languages'}. Set `language` to the one in "
                "its name."
            )
        return tables

    def _find_releases(self) -> dict[str, Path]:
        """Return the folder with the TSVs of each language: the one that is named, or in it."""
        tags = language_tags(self.settings["language"])
        folder = unpack_corpus(self.settings["data_folder"])
        if any(folder.glob("*.tsv")):
            if len(tags) > 1:
                raise ConfigError(
                    f"`language` names {', '.join(tags)}, but {folder} is of one language."
                )
            releases = {tags[0]: folder}
        else:
            releases = {check_language(tag): folder / tag for tag in tags}
        for release in releases.values():
            if not (release / "clips").is_dir():
                raise DataError(
                    f"data_folder: {release} has no clips. Name the folder of a release of Common "
                    "Voice, and set `language` to its language."
                )
        return releases


def _split_names(release: Path) -> set[str]:
    return {tsv.stem for tsv in release.glob("*.tsv")} - OTHER_TABLES


def _has_empty_evaluation(release: Path) -> bool:
    """Check whether dev and test have a header only, as in a small language."""
    tables = [release / f"{name}.tsv" for name in RELEASE_SPLITS[1:]]
    return all(
        table.is_file() and len([*islice(filter(str.strip, read_lines(table)), 2)]) < 2
        for table in tables
    )


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

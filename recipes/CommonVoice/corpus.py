"""The corpus of a Common Voice release (`sbkit.data.common_voice`), or of a folder of its form."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow.compute as pc

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.messages import note_once
from sbkit.data.cache import unpack_corpus
from sbkit.data.common_voice import (
    SPONTANEOUS_TABLE,
    UNASSIGNED,
    choose_rows,
    read_releases,
    read_spontaneous,
)
from sbkit.data.corpus import (
    RELEASE_SPLITS,
    USUAL_SPLITS,
    Corpus,
    SettingValues,
    named_folder,
    to_names,
)
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions, read_lines
from sbkit.text.languages import language_tags

# Tables that do not list clips.
OTHER_TABLES = {"clip_durations", "reported", "validated_sentences", "unvalidated_sentences"}
TRAIN, *EVALUATED = RELEASE_SPLITS
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
        names = ("clips", SPONTANEOUS_TABLE.format("*"))
        patterns = [*names, *(f"*/{name}" for name in names)]
        return folder is not None and any(any(folder.glob(pattern)) for pattern in patterns)

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the usual splits that the release has; a delta release has none."""
        available = self.available()
        if EVALUATED[-1] not in available and TRAIN in available:
            folder = self.settings["data_folder"]
            note_once(f"note: {folder} has no test.tsv: without `splits`, it has no test set.")
        usual = USUAL_SPLITS.items()
        return {role: [split for split in splits if split in available] for role, splits in usual}

    def available(self) -> list[str]:
        if self._find_tables():
            return [*RELEASE_SPLITS, UNASSIGNED]
        releases = self._find_releases().values()
        names = [{tsv.stem for tsv in release.glob("*.tsv")} for release in releases]
        return sorted(set.intersection(*names) - OTHER_TABLES)

    def files(self) -> list[Path]:
        folders = [table.parent for table in self._find_tables().values()]
        return folders or [*self._find_releases().values()]

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split; training on ``validated`` leaves out its rows that are in dev or test."""
        options = TableOptions.from_settings(self.settings)
        if tables := self._find_tables():
            manifests = [
                (tag, read_spontaneous(table, split, replace(options, language=tag)))
                for tag, table in tables.items()
            ]
            return Manifest.join_named(manifests, *self.files()).blocks()
        releases = self._find_releases()
        chosen = self.settings["splits"] or {}
        train = to_names(chosen.get("train") or TRAIN)
        is_dealt = len(releases) == len(train) == 1 and split in (*train, *EVALUATED)
        if is_dealt and EVALUATED[0] in to_names(chosen.get("valid") or EVALUATED[0]):
            (release,) = releases.values()
            if all(_is_empty(release / f"{name}.tsv") for name in EVALUATED):
                note_once(
                    f"note: dev and test of {release} are empty: speakers of {train[0]} are dealt."
                )
                rows = Manifest.join(read_releases(releases, train[0], options))
                return choose_rows(rows, split if split in EVALUATED else TRAIN, release).blocks()
        blocks = read_releases(releases, split, options)
        if split == VALIDATED and split in train:
            return self._without_evaluation(blocks, releases, options)
        return blocks

    def _without_evaluation(
        self, blocks: Iterator[Manifest], releases: Mapping[str, Path], options: TableOptions
    ) -> Iterator[Manifest]:
        """Leave out the rows whose clips are in dev or test, and count them."""
        names = {*EVALUATED} & {*self.available()}
        others = [block for name in names for block in read_releases(releases, name, options)]
        evaluated = Manifest.join(others).rows["audio"]
        for block in blocks:
            is_evaluated = pc.is_in(block.rows["audio"], value_set=evaluated).to_numpy()
            filtered = {"also in dev or test": int(is_evaluated.sum())}
            yield replace(block.filter(~is_evaluated), filtered=filtered)

    def about(self) -> Mapping[str, str]:
        """Return the names and the licenses that the datasheets state, for a model card."""
        names: list[str] = []
        licenses: list[str] = []
        for sheet in (folder / DATASHEET for folder in self.files()):
            text = sheet.read_text("utf-8", "replace") if sheet.is_file() else ""
            if title := _TITLE.search(text):
                names.append(f"{title[2].replace('*', '')}, {title[3]} ({title[1]})")
            if section := _LICENSE.search(text):
                link = _LINK.search(section[1])
                licenses.append(" ".join((link or section)[1].split()))
        return {"name": " and ".join(names), "license": " and ".join(dict.fromkeys(licenses))}

    def _find_tables(self) -> dict[str, Path]:
        """Return the table of each language; {} for a release of Scripted Speech."""
        folder = unpack_corpus(self.settings["data_folder"])
        tables = [
            *folder.glob(SPONTANEOUS_TABLE.format("*")),
            *folder.glob(f"*/{SPONTANEOUS_TABLE.format('*')}"),
        ]
        # The newest release counts: sps-corpus-10.0-2027-06-01-en, not 9.0.
        tables.sort(key=lambda file: [*map(int, re.findall(r"\d+", file.parent.name))])
        by_name = {table.name: table for table in tables}
        names = {
            tag: SPONTANEOUS_TABLE.format(tag) for tag in language_tags(self.settings["language"])
        }
        missing = [name for name in names.values() if name not in by_name]
        if tables and missing:
            raise DataError(
                f"data_folder: {folder} has no {missing[0]}, but {', '.join(by_name)}. Set "
                "`language` to the one in its name."
            )
        return {tag: by_name[name] for tag, name in names.items() if tables}

    def _find_releases(self) -> dict[str, Path]:
        """Return the folder with the TSVs of each language: the one that is named, or in it."""
        tags = language_tags(self.settings["language"])
        folder = unpack_corpus(self.settings["data_folder"])
        if any(folder.glob("*.tsv")):
            if len(tags) > 1:
                raise ConfigError(
                    f"`language` names {', '.join(tags)}, but {folder} is of one language.",
                    keys=("language",),
                )
            releases = {tags[0]: folder}
        else:
            releases = {tag: folder / tag for tag in tags}
        for release in releases.values():
            if not (release / "clips").is_dir():
                raise DataError(
                    f"data_folder: {release} has no clips. Name the folder of a release of Common "
                    "Voice, and set `language` to its language."
                )
        return releases


def _is_empty(tsv: Path) -> bool:
    """Check whether a table is there, but has a header only, as in a small language."""
    return tsv.is_file() and len([*islice(filter(str.strip, read_lines(tsv)), 2)]) < 2

"""Read a release of Common Voice's Spontaneous Speech: one table with the rows of all splits.

<data_folder>/ss-corpus-LANGUAGE.tsv   audio_file, transcription, split, quality_tags and others
              audios/                  MP3s, also of clips that the table leaves out

The format is that of release 5.0:
https://github.com/common-voice/cv-dataset/tree/main/datasets/spontaneous-speech
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from sbkit.base.errors import ConfigError
from sbkit.base.messages import plural
from sbkit.data.columns import TEXT_COLUMNS, find_column
from sbkit.data.corpus import DEFAULT_SHARES, deal_speakers
from sbkit.data.manifest import Manifest
from sbkit.data.tables import (
    RELEASE_SPLITS,
    Table,
    TableOptions,
    locate_clip,
    read_table,
    read_text_column,
    to_manifest,
)

logger = logging.getLogger(__name__)

TABLE_NAME = "ss-corpus-{}.tsv"
AUDIO_FOLDER = "audios"
UNASSIGNED = "unassigned"  # the split of rows whose transcription is not validated


def find_table(folder: Path, language: str) -> Path | None:
    """Return the table of a language in a folder or in one of its folders, None without one."""
    for pattern in (TABLE_NAME, f"*/{TABLE_NAME}"):
        if tables := [*folder.glob(pattern.format(language))]:
            # of the newest release: sps-corpus-10.0-2027-06-01-en, not 9.0
            return max(tables, key=lambda file: [*map(int, re.findall(r"\d+", file.parent.name))])
    return None


def read_spontaneous(
    file: Path, split: str | None, options: TableOptions, beside: Sequence[Path] = ()
) -> Manifest:
    """Read one split of a release, or all rows.

    Rows without a transcription are left out and counted. A row without a split, and every row of a
    table that assigns none, gets the split that `choose_splits` chooses.

    beside: the other tables of the run, in which the same people may speak.

    Raises:
        ConfigError: the table has no such split.
        DataError: splits cannot be chosen.
    """
    table = read_table(file, options.encoding)
    rows = table.rows
    own = _find_speakers(table, options)
    split_rows = [*range(len(rows))]
    if split is not None:
        tables_beside = (read_table(other, options.encoding) for other in beside)
        speakers_beside = [_find_speakers(other, options) for other in tables_beside]
        splits = choose_splits(own, speakers_beside, file)
        split_rows = [row for row, name in enumerate(splits) if name == split]
        if split == "train":
            pairs = zip(splits, own.splits, strict=True)
            if count := sum(name in RELEASE_SPLITS and name != stated for name, stated in pairs):
                rows_chosen = plural(count, "row")
                logger.info(f"{file.name}: the splits of {rows_chosen} are chosen by speaker")
        elif not split_rows and split not in RELEASE_SPLITS:
            names = ", ".join(sorted({*RELEASE_SPLITS, *splits}))
            raise ConfigError(f"{file} has no split {split!r}. Choose among: {names}.")
    indices = [row for row in split_rows if own.is_filled[row]]
    num_empty = len(split_rows) - len(indices)
    if "language" in rows.column_names:  # its name in English; manifests have its tag
        rows = rows.drop_columns(["language"])
    excluded = table.excluded if split in (None, "train") else ()  # they have no split
    lines = [int(table.lines[row]) for row in indices]
    chosen = Table(file, rows.take(pa.array(indices, pa.int64())), lines, excluded)
    audios = file.parent / AUDIO_FOLDER
    manifest = to_manifest(chosen, options, partial(locate_clip, audios), audios)
    filtered = {"not transcribed": num_empty} if num_empty else {}
    return replace(manifest.distinct(audios), filtered=filtered)


class TableSpeakers(NamedTuple):
    """The rows of a table: who speaks, the assigned splits, and whether they are transcribed."""

    speakers: Sequence[str]
    splits: Sequence[str]
    is_filled: Sequence[bool]

    @property
    def free(self) -> set[str]:
        """The splits of rows to choose for: the unassigned ones if the table assigns none."""
        return {""} if {*self.splits} & {*RELEASE_SPLITS} else {"", UNASSIGNED}


def _find_speakers(table: Table, options: TableOptions) -> TableSpeakers:
    names = table.rows.column_names
    is_filled = [True] * len(table.rows)
    text = find_column(names, options.text_column or None, TEXT_COLUMNS)
    if text and options.text_column is not False:
        is_filled = [bool(transcript.strip()) for transcript in read_text_column(table.rows, text)]
    clips = read_text_column(table.rows, "audio_file")
    speakers = zip(read_text_column(table.rows, "client_id"), clips, strict=True)
    return TableSpeakers(
        # The first releases name no speakers: a row without one is one of its own.
        [speaker or f"clip {clip}" for speaker, clip in speakers],
        [name.strip() for name in read_text_column(table.rows, "split")],
        is_filled,
    )


def choose_splits(own: TableSpeakers, beside: Sequence[TableSpeakers], source: object) -> list[str]:
    """Return the split of each row.

    A row that has none gets the split of its speaker's other rows, in this table or another: the
    first that has one. Other speakers with transcribed rows are dealt (`deal_speakers`). If the
    table has no row in train, dev and test, the unassigned ones are dealt, too.

    source: the table, for an error.

    Raises DataError if there are fewer than three speakers to deal.
    """
    tables = [own, *beside]  # its own assignments count most
    assigned: dict[str, str] = {}
    for table in tables:
        for speaker, split in zip(table.speakers, table.splits, strict=True):
            if split in RELEASE_SPLITS:
                assigned.setdefault(speaker, split)
    others = {
        speaker
        for table in tables
        for speaker, split, filled in zip(*table, strict=True)
        if filled and split in table.free and speaker not in assigned
    }
    dealt = deal_speakers(others, DEFAULT_SHARES, source, fill=not assigned)
    split_of = dealt | assigned
    return [
        split_of.get(speaker, UNASSIGNED) if split in own.free else split
        for speaker, split in zip(own.speakers, own.splits, strict=True)
    ]

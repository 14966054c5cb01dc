"""Read a release of Common Voice's Spontaneous Speech: one table with the rows of all splits.

<data_folder>/ss-corpus-LANGUAGE.tsv   audio_file, transcription, split, quality_tags and others
              audios/                  MP3s, also of clips that the table leaves out

The format is that of release 5.0:
https://github.com/common-voice/cv-dataset/tree/main/datasets/spontaneous-speech
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from sbkit.base.errors import ConfigError
from sbkit.base.messages import plural
from sbkit.data.dealing import DEFAULT_SHARES, deal_speakers
from sbkit.data.manifest import Manifest
from sbkit.data.tables import (
    RELEASE_SPLITS,
    TEXT_COLUMNS,
    Table,
    TableOptions,
    find_column,
    locate_clip,
    read_table,
    read_text_column,
    to_manifest,
)
from sbkit.text.tags import select_tags

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
    file: Path, split: str | None, options: TableOptions, kept_tags: Collection[str] = ()
) -> Manifest:
    """Read one split of a release, or all rows.

    Rows without a transcription are left out and counted; ``kept_tags`` stay in the others. A row
    without a split, and every row of a table that assigns none, gets the split that
    `choose_splits` chooses.

    Raises:
        ConfigError: the table has no such split.
        DataError: splits cannot be chosen.
    """
    table = read_table(file, options.encoding)
    rows = table.rows
    is_filled = [True] * len(rows)
    text = find_column(rows.column_names, options.text_column or None, TEXT_COLUMNS)
    if text and options.text_column is not False:
        texts = read_text_column(table, text)
        is_filled = [bool(transcript.strip()) for transcript in texts]
        texts = [select_tags(transcript, kept_tags) for transcript in texts]
        rows = rows.set_column(rows.column_names.index(text), text, pa.array(texts, pa.string()))
    split_rows = [*range(len(rows))]
    if split is not None:
        splits = choose_splits(table, is_filled)
        split_rows = [row for row, name in enumerate(splits) if name == split]
        if split == "train":
            _log_chosen(table, splits)
        elif not split_rows and split not in RELEASE_SPLITS:
            names = ", ".join(sorted({*RELEASE_SPLITS, *splits}))
            raise ConfigError(f"{file} has no split {split!r}. Choose among: {names}.")
    indices = [row for row in split_rows if is_filled[row]]
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


def _log_chosen(table: Table, splits: Sequence[str]) -> None:
    """Log how many rows belong to a split that the table does not name."""
    names = read_text_column(table, "split")
    count = sum(
        split in RELEASE_SPLITS and split != name.strip()
        for split, name in zip(splits, names, strict=True)
    )
    if count:
        rows = plural(count, "row")
        logger.info(f"{table.file.name}: the splits of {rows} are chosen by speaker")


def choose_splits(table: Table, is_filled: Sequence[bool]) -> list[str]:
    """Return the split of each row.

    A row that has none gets the split of its speaker's other rows. Other speakers with transcribed
    rows are dealt (`deal_speakers`); a row without a speaker is one of its own. If the table has no
    row in train, dev and test, the unassigned ones are dealt, too.

    Raises DataError if there are fewer than three speakers to deal.
    """
    names = [name.strip() for name in read_text_column(table, "split")]
    free = {""} if {*names} & {*RELEASE_SPLITS} else {"", UNASSIGNED}
    speakers = [  # the first releases name none
        speaker or f"clip {clip}"
        for speaker, clip in zip(
            read_text_column(table, "client_id"), read_text_column(table, "audio_file"), strict=True
        )
    ]
    assigned = {s: name for s, name in zip(speakers, names, strict=True) if name in RELEASE_SPLITS}
    counts = Counter(
        speaker
        for speaker, name, filled in zip(speakers, names, is_filled, strict=True)
        if filled and name in free and speaker not in assigned
    )
    dealt = deal_speakers(counts, DEFAULT_SHARES, table.file, fill=not assigned)
    split_of = dealt | assigned
    return [
        split_of.get(speaker, UNASSIGNED) if name in free else name
        for speaker, name in zip(speakers, names, strict=True)
    ]

"""Releases of Common Voice: Scripted Speech, whose splits are tables, and Spontaneous Speech.

<release>/train.tsv ...               a TSV for each split
          clips/                      the audio files
          clip_durations.tsv          since 16.1: their milliseconds
<release>/ss-corpus-LANGUAGE.tsv      audio_file, transcription, split, quality_tags and others
          audios/                     MP3s, also of clips that the table leaves out

https://github.com/common-voice/cv-dataset/tree/main/datasets has their formats.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.arrays import Counts
from sbkit.base.errors import DataError
from sbkit.data.corpus import DEFAULT_SHARES, RELEASE_SPLITS, deal_speakers
from sbkit.data.manifest import DURATION_COLUMN, Manifest, are_distinct, hash_texts
from sbkit.data.tables import (
    CLIPS_FOLDER,
    Table,
    TableOptions,
    join_path,
    locate_clip,
    read_blocks,
    read_table,
    read_text_column,
    to_manifest,
)

DURATIONS_FILE = "clip_durations.tsv"
PLAIN_CLIP = r"^\w[\w-]*\.mp3$"  # a name of a clip

# Scripted Speech


def read_release(tsv: Path, options: TableOptions) -> Manifest:
    """Read one TSV of a release; ``clips/`` is in the same folder."""
    return Manifest.join(read_releases({options.language: tsv.parent}, tsv.stem, options))


def read_releases(
    releases: Mapping[str, Path], split: str, options: TableOptions
) -> Iterator[Manifest]:
    """Yield one split, a TSV in the release folder of each language, in blocks.

    One with faults, repeated clips or other names than those of Mozilla is one block.
    """
    tsvs = {language: release / f"{split}.tsv" for language, release in releases.items()}
    is_plain = _has_plain_clips(tsvs.values(), options)
    parts = {
        language: _read_release(tsv, replace(options, language=language), is_plain)
        for language, tsv in tsvs.items()
    }
    if is_plain:
        first_blocks = [next(part) for part in parts.values()]
        columns = [block.rows.schema.empty_table() for block in first_blocks]
        for first, part in zip(first_blocks, parts.values(), strict=True):
            for block in chain([first], part):
                rows = pa.concat_tables([*columns, block.rows], promote_options="default")
                yield replace(block, rows=rows)
    else:
        named = [(language, Manifest.join(part)) for language, part in parts.items()]
        first_release = next(iter(releases.values()))
        base = first_release.parent if len(parts) > 1 else first_release / CLIPS_FOLDER
        yield Manifest.join_named(named, base)


def _has_plain_clips(tsvs: Iterable[Path], options: TableOptions) -> bool:
    """Return whether each row of some tables is a whole file, which no other row names."""
    hashes: list[Counts] = []
    for tsv in tsvs:
        for block in read_blocks(tsv, options.encoding):
            names = block.rows.column_names
            path = options.find(names, "path", tsv)
            others = [options.find(names, role, tsv) for role in ("id", "channel", "start")]
            if not path or any(others) or block.excluded:
                return False
            clip_names = block.rows[path]
            if not pc.all(pc.match_substring_regex(clip_names, PLAIN_CLIP)).as_py():
                return False
            hashes.append(hash_texts(clip_names))
    return are_distinct(hashes)


def _read_release(tsv: Path, options: TableOptions, is_plain: bool) -> Iterator[Manifest]:
    """Yield the blocks of a TSV, with a column ``duration_ms``; one block if it is not plain."""
    clips = tsv.parent / CLIPS_FOLDER
    durations = _read_durations(tsv.parent / DURATIONS_FILE, clips)
    tables = read_blocks(tsv, options.encoding) if is_plain else [read_table(tsv, options.encoding)]
    for table in tables:
        manifest = to_manifest(table, options, partial(locate_clip, clips), clips)
        rows = manifest.rows
        if durations and DURATION_COLUMN not in rows.column_names:
            hashes, milliseconds = durations
            own_hashes = hash_texts(rows["audio"])
            indices = np.searchsorted(hashes, own_hashes)
            indices[indices == len(hashes)] = 0
            is_missing = hashes[indices] != own_hashes
            column = milliseconds.take(pa.array(indices, mask=is_missing))
            manifest = replace(manifest, rows=rows.append_column(DURATION_COLUMN, column))
        yield manifest


def _read_durations(file: Path, clips: Path) -> tuple[Counts, pa.ChunkedArray] | None:
    """Return the durations of a release since 16.1: hashes of paths, and milliseconds.

    Two of 40 million hashes of 64 bits are equal in one of 20,000 releases.
    """
    if not file.is_file():
        return None
    columns: list[pa.ChunkedArray] = read_table(file).rows.columns
    if len(columns) < 2:
        raise DataError(
            f"{file} must have the columns clip and duration[ms], but has only one. Remove it.",
            where=f"{file}:1",
        )
    hashes = np.concatenate([hash_texts(join_path(clips, names)) for names in columns[0].chunks])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], columns[1].take(pa.array(order))


# Spontaneous Speech

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
    file: Path, split: str | None, options: TableOptions, run_tables: Sequence[Path] = ()
) -> Manifest:
    """Read one split of a release, or all rows, without those that are not transcribed.

    run_tables: all tables of the run: the same people may speak in others.
    """
    table = read_table(file, options.encoding)
    rows = table.rows
    own = _find_speakers(table, options)
    split_rows = [*range(len(rows))]
    if split is not None:
        beside = (read_table(other, options.encoding) for other in run_tables if other != file)
        splits = choose_splits(own, [_find_speakers(other, options) for other in beside], file)
        split_rows = [row for row, name in enumerate(splits) if name == split]
    indices = [row for row in split_rows if own.is_filled[row]]
    num_empty = len(split_rows) - len(indices)
    if "language" in rows.column_names:  # its name in English; manifests have its tag
        rows = rows.drop_columns(["language"])
    excluded = table.excluded if split in (None, "train") else ()  # they have no split
    lines = [int(table.lines[row]) for row in indices]
    chosen = Table(str(file), rows.take(pa.array(indices, pa.int64())), lines, excluded)
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
    if text := options.find(names, "text", table.file):
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

    A row that has none gets the split of its speaker's other rows, in this table or another. Other
    speakers with transcribed rows are dealt (`deal_speakers`), and those of unassigned rows if the
    table has no row in train, dev and test.

    source: the table, for an error.
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

"""Read a release of Common Voice's Spontaneous Speech: one table with the rows of all splits.

<data_folder>/ss-corpus-LANGUAGE.tsv   audio_file, transcription, split, quality_tags and others
              audios/                  MP3s, also of clips that the table leaves out

The format is that of release 5.0:
https://github.com/common-voice/cv-dataset/tree/main/datasets/spontaneous-speech
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.manifest import Manifest, to_texts
from sbkit.data.tables import (
    TEXT_COLUMNS,
    Table,
    TableOptions,
    find_column,
    locate_clip,
    read_table,
    to_manifest,
)
from sbkit.text.tags import check_tag_names, select_tags

TABLE_NAME = "ss-corpus-{}.tsv"
AUDIO_FOLDER = "audios"
SPLITS = ("train", "dev", "test")
UNASSIGNED = "unassigned"  # the split of rows whose transcription is not validated
EVALUATION_SHARE = 0.1  # of the rows whose split is chosen here, for each of dev and test
QUALITY_TAGS = (  # those that release 5.0 documents
    *("short-audio", "long-audio", "transcription-length", "speech-rate", "non-allowed-script"),
    *("mixed-script-words", "mixed-script-transcription", "dataset-language-audio-mismatch"),
)


@dataclass(frozen=True)
class SpontaneousOptions:
    """Which tags stay in the transcriptions, and which rows are left out."""

    keep_tags: Collection[str] = ()
    skip_quality_tags: Sequence[str] = ()

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> Self:
        skipped = knobs.get("skip_quality_tags") or []
        if not isinstance(skipped, list | tuple):
            raise ConfigError(
                f"`skip_quality_tags` must be a list of tags, such as [short-audio], but is "
                f"{skipped!r}. Choose among {', '.join(QUALITY_TAGS)}."
            )
        return cls(check_tag_names(knobs.get("keep_tags")), tuple(map(str, skipped)))


def find_table(folder: Path, language: str) -> Path | None:
    """Return the table of a language in a folder or in one of its folders, None without one."""
    for pattern in (TABLE_NAME, f"*/{TABLE_NAME}"):
        if tables := sorted(folder.glob(pattern.format(language))):
            return tables[-1]  # of the newest release
    return None


def read_spontaneous(
    file: Path, split: str | None, options: TableOptions, spontaneous: SpontaneousOptions
) -> Manifest:
    """Read one split of a release, or all rows.

    Rows without a transcription are left out, and so are rows with a quality tag to skip; both are
    counted. A row without a split, and every row of a table that assigns none, gets the split that
    `choose_splits` chooses.

    Raises:
        ConfigError: a quality tag is unknown, or the table has no such split.
    """
    table = read_table(file)
    rows = table.rows
    is_filled = np.ones(len(rows), bool)
    text = options.text_column or find_column(rows.column_names, None, TEXT_COLUMNS)
    if options.text_column is not False and text in rows.column_names:
        texts = _read_column(table, text)
        is_filled = np.array([bool(transcript.strip()) for transcript in texts])
        texts = [select_tags(transcript, spontaneous.keep_tags) for transcript in texts]
        rows = rows.set_column(rows.column_names.index(text), text, pa.array(texts, pa.string()))
    quality = [tags.split("|") for tags in _read_column(table, "quality_tags")]
    skipped = _skipped_tags(file, quality, spontaneous.skip_quality_tags)
    is_used = is_filled & np.array([tag is None for tag in skipped], bool)
    names = np.array(choose_splits(table, is_used))
    if split is not None and split not in {*SPLITS, *names}:
        raise ConfigError(
            f"{file} has no split {split!r}. Choose among: {', '.join(sorted({*SPLITS, *names}))}."
        )
    is_of_split = names == split if split is not None else np.ones(len(rows), bool)
    indices = np.flatnonzero(is_of_split & is_used)
    filtered = Counter(
        f"quality tag {skipped[row]}" if is_filled[row] else "not transcribed"
        for row in np.flatnonzero(is_of_split & ~is_used)
    )
    if "language" in rows.column_names:  # its name in English; manifests have its tag
        rows = rows.drop_columns(["language"])
    excluded = table.excluded if split in (None, "train") else ()  # they have no split
    taken = Table(file, rows.take(pa.array(indices)), np.asarray(table.lines)[indices], excluded)
    audios = file.parent / AUDIO_FOLDER
    manifest = to_manifest(taken, options, partial(locate_clip, audios), audios)
    return replace(manifest.distinct(audios), filtered=filtered)


def _read_column(table: Table, name: str) -> list[str]:
    """Return the texts of a column; empty ones if the table lacks it, as first releases do."""
    if name not in table.rows.column_names:
        return [""] * len(table.rows)
    return to_texts(table.rows[name].fill_null(""))


def _skipped_tags(
    file: Path, quality: Iterable[Sequence[str]], skipped: Sequence[str]
) -> list[str | None]:
    """Return for each row the first of its quality tags that is skipped, None without one."""
    tags = [[tag.strip() for tag in row] for row in quality]
    known = dict.fromkeys([*QUALITY_TAGS, *(tag for row in tags for tag in row if tag)])
    for tag in skipped:
        if tag not in known:
            raise ConfigError(
                f"`skip_quality_tags` names {tag!r}, which is neither a known quality tag nor in "
                f"{file}. Choose among {', '.join(known)}."
            )
    return [next((tag for tag in row if tag in skipped), None) for row in tags]


def choose_splits(table: Table, is_used: Sequence[bool]) -> list[str]:
    """Return the split of each row.

    A used row that has none gets the split of its speaker's other rows. Other speakers are dealt
    to test and dev in turn, those with the fewest rows first, while each has at most a tenth of the
    rows; the rest is for training. If no row is in train, dev or test, the unassigned ones are
    dealt, too.

    Raises DataError if there are fewer than three speakers to deal.
    """
    names = [name.strip() for name in _read_column(table, "split")]
    free = {""} if {*names} & {*SPLITS} else {"", UNASSIGNED}
    speakers = _read_column(table, "client_id")
    pairs = [*zip(speakers, names, is_used, strict=True)]
    split_of = {speaker: name for speaker, name, _ in pairs if name in SPLITS}
    counts = Counter(
        speaker
        for speaker, name, used in pairs
        if used and name in free and speaker not in split_of
    )
    if counts:
        split_of |= _deal(table.file, counts, is_needed=not split_of)
    return [
        split_of.get(speaker, UNASSIGNED) if used and name in free else name or UNASSIGNED
        for speaker, name, used in pairs
    ]


def _deal(file: Path, counts: Mapping[str, int], *, is_needed: bool) -> dict[str, str]:
    """Deal speakers, with their numbers of rows, to the splits."""
    if is_needed and len(counts) < len(SPLITS):
        raise DataError(
            f"{file} assigns no row to train, dev and test, and has {len(counts)} of the three "
            "speakers that it takes to choose them. Write the splits into its column `split`."
        )
    limit = EVALUATION_SHARE * sum(counts.values())
    num_rows = Counter[str]()
    split_of: dict[str, str] = {}
    # Speakers with equally many rows come in an order that says nothing about them.
    order = sorted(counts, key=lambda s: (counts[s], hashlib.sha256(s.encode()).digest()))
    for speaker in order:
        split = min(("test", "dev"), key=num_rows.__getitem__)
        is_first = is_needed and not num_rows[split]
        if not is_first and num_rows[split] + counts[speaker] > limit:
            split = "train"
        num_rows[split] += counts[speaker]
        split_of[speaker] = split
    return split_of

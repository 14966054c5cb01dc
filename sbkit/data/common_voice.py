"""Read releases of Common Voice: Scripted Speech, with a table per split, and Spontaneous Speech.

<release>/train.tsv ...               a TSV for each split
          clips/                      the audio files
          clip_durations.tsv          since 16.1: their durations in milliseconds
<release>/ss-corpus-LANGUAGE.tsv      audio_file, transcription, split, quality_tags and others
          audios/                     MP3s, also of clips that the table leaves out

The formats are described in https://github.com/common-voice/cv-dataset/tree/main/datasets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from sbkit.base.arrays import Counts
from sbkit.base.errors import DataError
from sbkit.data.corpus import DEFAULT_SHARES, RELEASE_SPLITS, deal_speakers
from sbkit.data.manifest import DURATION_COLUMN, Manifest, are_distinct, hash_texts
from sbkit.data.tables import (
    CLIPS_FOLDER,
    TableOptions,
    join_path,
    locate_clip,
    read_blocks,
    read_table,
    read_text_column,
    to_manifest,
)

DURATIONS_FILE = "clip_durations.tsv"
SPONTANEOUS_TABLE = "ss-corpus-{}.tsv"
AUDIO_FOLDER = "audios"
UNASSIGNED = "unassigned"  # the split of rows whose transcription is not validated

# ---- Scripted Speech

Durations = tuple[Counts, pa.ChunkedArray]  # sorted hashes of paths, and milliseconds


def read_releases(
    releases: Mapping[str, Path], split: str, options: TableOptions
) -> Iterator[Manifest]:
    """Yield the rows of a split, a TSV in the release folder of each language, in blocks.

    A split with repeated clips, or repeated names of clips, is one block.
    """
    durations = {language: _read_durations(release) for language, release in releases.items()}
    read = partial(_read_blocks, releases, split, options, durations)
    columns: list[pa.Table] = []
    paths: list[Counts] = []
    ids: list[Counts] = []
    for block in read():
        columns.append(block.rows.schema.empty_table())
        paths.append(hash_texts(block.rows["audio"]))
        ids.append(hash_texts(block.rows["id"]))
    if are_distinct(paths) and are_distinct(ids):
        for block in read():
            rows = pa.concat_tables([*columns, block.rows], promote_options="default")
            yield replace(block, rows=rows)
    else:
        first = next(iter(releases.values()))
        base = first.parent if len(releases) > 1 else first / CLIPS_FOLDER
        yield Manifest.join(read()).distinct(base)


def _read_blocks(
    releases: Mapping[str, Path],
    split: str,
    options: TableOptions,
    durations: Mapping[str, Durations | None],
) -> Iterator[Manifest]:
    """Yield the rows of all releases, with a column ``duration_ms`` if the durations are known."""
    for language, release in releases.items():
        clips = release / CLIPS_FOLDER
        release_options = replace(options, language=language)
        for table in read_blocks(release / f"{split}.tsv", options.encoding):
            block = to_manifest(table, release_options, partial(locate_clip, clips), clips)
            release_durations = durations[language]
            if release_durations and DURATION_COLUMN not in block.rows.column_names:
                hashes, milliseconds = release_durations
                block_hashes = hash_texts(block.rows["audio"])
                indices = np.searchsorted(hashes, block_hashes)
                indices[indices == len(hashes)] = 0
                is_missing = hashes[indices] != block_hashes
                column = milliseconds.take(pa.array(indices, mask=is_missing))
                block = replace(block, rows=block.rows.append_column(DURATION_COLUMN, column))
            if len(releases) > 1:
                named = (replace(row, id=f"{language} {row.id}") for row in block.excluded)
                block = replace(block, excluded=tuple(named))
            yield block


def _read_durations(release: Path) -> Durations | None:
    """Return the durations of a release since 16.1; None for earlier ones.

    Among 40 million hashes of 64 bits, two are equal with a probability of 1 in 20,000.
    """
    file = release / DURATIONS_FILE
    if not file.is_file():
        return None
    columns: list[pa.ChunkedArray] = read_table(file).rows.columns
    if len(columns) < 2:
        raise DataError(
            f"{file} must have the columns clip and duration[ms], but has only one column. Remove "
            "the file.",
            file=f"{file}",
            line=1,
        )
    hashes = hash_texts(join_path(release / CLIPS_FOLDER, columns[0]))
    order = np.argsort(hashes, kind="stable")
    return hashes[order], columns[1].take(pa.array(order))


# ---- Spontaneous Speech


def read_spontaneous(file: Path, split: str | None, options: TableOptions) -> Manifest:
    """Read the transcribed rows of one split of a release, or of all splits."""
    table = read_table(file, options.encoding)
    names = table.rows.column_names
    text = options.find(names, "text", file)
    sentences = read_text_column(table.rows, text)
    is_used = np.array([not text or bool(sentence.strip()) for sentence in sentences])
    # The column `language` has the English name of the language; manifests have its tag.
    rows = table.rows.select([name for name in names if name != "language"])
    used = replace(table, rows=rows.filter(pa.array(is_used)), lines=np.array(table.lines)[is_used])
    audios = file.parent / AUDIO_FOLDER
    manifest = to_manifest(used, options, partial(locate_clip, audios), audios).distinct(audios)
    if num_empty := len(is_used) - len(used.lines):
        manifest = replace(manifest, filtered={"not transcribed": num_empty})
    return manifest if split is None else choose_rows(manifest, split, file)


def choose_rows(manifest: Manifest, split: str, source: object) -> Manifest:
    """Return the rows of a split, by the column ``split``.

    A row without a split gets the split of its speaker, or train. If no row has a split, speakers
    are dealt to the splits.

    source: the file of the manifest, for an error.
    """
    names_and_ids = zip(read_text_column(manifest.rows, "speaker"), manifest.ids, strict=True)
    speakers = [name or f"clip {id}" for name, id in names_and_ids]
    rows = [*zip(speakers, read_text_column(manifest.rows, "split"), strict=True)]
    split_of = {speaker: name for speaker, name in rows if name in RELEASE_SPLITS}
    unassigned_names = {""} if split_of else {"", UNASSIGNED}
    split_of = split_of or deal_speakers({*speakers}, DEFAULT_SHARES, source)
    splits = [
        split_of.get(speaker, RELEASE_SPLITS[0]) if name in unassigned_names else name
        for speaker, name in rows
    ]
    chosen = manifest.filter(np.array(splits) == split)
    # Excluded rows have no split; they are reported once, with the training split.
    return chosen if split == RELEASE_SPLITS[0] else Manifest(chosen.rows)

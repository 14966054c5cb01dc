"""Manifests of the user's own: tables, NeMo's JSON Lines, Kaldi's folders, saved datasets."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.data.corpora.saved_dataset import embedded_folder, is_saved_dataset, read_saved_dataset
from sbkit.data.corpora.tables import (
    PATH_COLUMNS,
    Table,
    find_column,
    find_text_column,
    read_table,
)
from sbkit.data.storage.clips import Clip, Clips
from sbkit.data.storage.manifest import BadRow, Manifest, collect, join_manifests, open_names

COLUMNS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}  # Kaldi's
ID_COLUMNS = ("id", "utt_id", "utterance_id", "key")

PLAIN = r"^\w[\w-]*(?:[./]\w[\w-]*)*\.\w+$"  # the name of a file below a folder
NOT_STEM = r"^.*/|\.\w+$"  # what such a name has beside its stem

TextColumn = str | Literal[False] | None
Located = str | tuple[str, str]  # a path, or the reason and the detail why there is none


def read_manifests(
    sources: Sequence[Path], *, path_column: str | None, text_column: TextColumn, language: str
) -> Manifest:
    """Read files and folders, in their order, as one manifest.

    Args:
        sources: CSV, TSV or JSON Lines, folders of Kaldi, datasets saved to disk, parquet.
        path_column: the column of the audio's path, relative to the manifest; null: a usual name.
        text_column: the column of the transcript; null: a usual name; False: there is none.
        language: of what is spoken, "" where that is not known; the column ``language`` where the
            manifest has none.

    Raises:
        SbkitError: a source cannot be read, or lacks a column.
    """
    parts = [
        (source.name, _read_source(source, path_column, text_column, language))
        for source in sources
    ]
    return join_manifests(parts, *map(embedded_folder, sources), sources[0].parent)


def _read_source(
    source: Path, path_column: str | None, text_column: TextColumn, language: str
) -> Manifest:
    if is_kaldi(source):
        return collect(_read_kaldi(source, language, transcripts=text_column is not False))
    if is_saved_dataset(source):
        table = read_saved_dataset(source)
    elif source.is_dir():
        raise SbkitError(
            f"A manifest that is a folder must be Kaldi's (wav.scp and text) or a dataset saved by "
            f"datasets.save_to_disk, but {source} is neither. Name a file in it."
        )
    else:
        table = read_table(source)
    folder = table.file.parent
    return read_rows(table, path_column, text_column, language, partial(locate, folder), folder)


def read_rows(
    table: Table,
    path_column: str | None,
    text_column: TextColumn,
    language: str,
    find: Callable[[str], Located],
    folder: Path | None = None,
) -> Manifest:
    """Make clips of the rows of a table.

    Args:
        table: rows as texts.
        path_column: as `read_manifests` takes it.
        text_column: likewise.
        language: likewise.
        find: returns the file that a name in the column of the paths means.
        folder: in which `find` looks for plain names; a table that has no others is read by whole
            columns, three times as fast. None: `find` is asked for all.

    Raises:
        SbkitError: the table lacks a column.
    """
    path = find_column(table, path_column, PATH_COLUMNS, "path_column")
    text = find_text_column(table, text_column)
    lower = {column.lower(): column for column in table.rows.column_names}
    id = next((lower[name] for name in ID_COLUMNS if name in lower), "")
    rows, bad, own = table.rows, [*table.bad_rows], dict[str, pa.Array]()
    if folder and not id and "offset" not in rows.column_names:
        own = _plain_clips(rows[path].fill_null(""), folder)
    if not own:
        own, rows = _find_clips(table, (path, id, "offset"), find, bad)
    sentences = rows[text].fill_null("") if text else pa.array([""] * len(rows), pa.string())
    columns = {
        new: rows[old] for old, new in open_names(rows.column_names, (path, text, id)).items()
    }
    spoken = columns.get("language", pa.nulls(len(rows), pa.string()))
    columns["language"] = spoken.fill_null(language)
    return Manifest(Clips(pa.table({**own, "sentence": sentences}), pa.table(columns)), tuple(bad))


def _plain_clips(names: pa.ChunkedArray, folder: Path) -> dict[str, pa.Array]:
    """Return the ids and paths of files below a folder, none where a name is not plain."""
    if not pc.all(pc.match_substring_regex(names, PLAIN)).as_py():
        return {}
    base, slash = pa.scalar(os.fsencode(folder), pa.binary()), pa.scalar(b"/", pa.binary())
    paths = pc.binary_join_element_wise(base, names.cast(pa.binary()), slash)
    return {"id": pc.replace_substring_regex(names, NOT_STEM, ""), "path": paths}


def _find_clips(
    table: Table, names: Sequence[str], find: Callable[[str], Located], bad: list[BadRow]
) -> tuple[dict[str, pa.Array], pa.Table]:
    """Return the ids and paths of a table's clips, and their rows; note the ``bad`` ones.

    names: of the columns of the path, the id and the offset.
    """
    kept, ids, paths = list[int](), list[str](), list[bytes]()
    values = (_values(table, column) for column in names)
    for place, (name, utterance, offset) in enumerate(zip(*values, strict=False)):
        file = (
            ("a part of a longer file", f"offset {offset} of {name}")
            if offset.strip(" 0.")  # NeMo's, in seconds: whole files are read
            else find(name.strip())
        )
        if isinstance(file, tuple):
            bad.append(BadRow(f"row {table.numbers[place]}", *file))
            continue
        kept.append(place)
        base = file.rpartition("/")[2]  # a Path takes ten times as long
        ids.append(utterance.strip() or base.rpartition(".")[0] or base)
        paths.append(os.fsencode(file))
    rows = table.rows if len(kept) == len(table.rows) else table.rows.take(pa.array(kept, "int64"))
    return {"id": pa.array(ids, pa.string()), "path": pa.array(paths, pa.binary())}, rows


def _values(table: Table, column: str) -> Iterable[str]:
    """Return the texts of a column, or of none."""
    return (
        table.rows[column].fill_null("").to_pylist()
        if column in table.rows.column_names
        else repeat("")
    )


def locate(folder: Path, name: str) -> Located:
    """Return the path that a name in a manifest means, relative to its folder."""
    name = name.removeprefix("file://")
    if not name:
        return "no path", "the field of the path is empty"
    if "://" in name:
        return "not a file on this machine", name
    if name.startswith("~/"):
        return str(Path(name).expanduser())
    return name if name.startswith("/") else f"{folder}/{name}"


def is_kaldi(source: Path) -> bool:
    """Return whether a source is a data folder of Kaldi's form."""
    return (source / "wav.scp").is_file()


def _read_kaldi(
    folder: Path, language: str, *, transcripts: bool = True
) -> Iterator[Clip | BadRow]:
    """Read Kaldi's or WeNet's folder: ``wav.scp``, ``text`` and, where it is, ``utt2spk``.

    Each file has lines "KEY VALUE". Paths are relative to the folder.

    Its clips have the column ``language``, which is that of what is spoken without ``utt2lang``.

    Raises:
        SbkitError: ``wav.scp`` holds a command, there are ``segments``, or ``text`` is missing.
    """
    if (folder / "segments").is_file():
        raise SbkitError(
            f"Each recording of {folder} must be one utterance, but the file segments cuts them. "
            "Cut the recordings into files first (in Kaldi: extract-segments)."
        )
    audio = _read_pairs(folder / "wav.scp")
    sentences = dict(_read_pairs(folder / "text")) if transcripts else {}
    columns = {
        name: dict(_read_pairs(folder / file))
        for file, name in COLUMNS.items()
        if (folder / file).is_file()
    }
    if (folder / "spk2gender").is_file():
        of_speaker = dict(_read_pairs(folder / "spk2gender"))
        speakers = columns.get("speaker", {})
        columns.setdefault("gender", {u: of_speaker.get(s, "") for u, s in speakers.items()})
    for number, (utterance, name) in enumerate(audio, start=1):
        where = f"wav.scp line {number}"
        if name.endswith("|") or name.startswith("|"):
            raise SbkitError(
                f"{folder}/wav.scp must name audio files, but line {number} is a command "
                f"({name[:60]}), and sbkit runs none. Write its audio to files and name those."
            )
        if not name:
            yield BadRow(where, "no path", f"{utterance or 'the line'} has no path")
        elif sentences and utterance not in sentences:
            yield BadRow(where, "no transcript", f"text has no line for {utterance}")
        else:
            kept = {column: values.get(utterance, "") for column, values in columns.items()}
            kept.setdefault("language", language)
            yield Clip(utterance, folder / name, sentences.get(utterance, ""), kept)
    for utterance in sorted(sentences.keys() - {key for key, _ in audio}):
        yield BadRow(utterance, "no audio file", "text has a line for it, wav.scp has none")


def _read_pairs(file: Path) -> list[tuple[str, str]]:
    what = f"The file {file.name} of a data folder of Kaldi"
    lines = read_text(file, largest=1 << 31, what=what)
    split = (line.strip().split(maxsplit=1) for line in lines)
    return [(parts[0] if parts else "", parts[1] if len(parts) > 1 else "") for parts in split]

"""Read tars of clips as a stream: pairs of WebDataset, NeMo's tarred manifests, Lhotse Shar.

members -> samples: the audio in a file, and the texts beside it -> batches of clips

WebDataset   KEY.flac with KEY.json, an object, or KEY.txt
NeMo         audio_N.tar of audio; its rows are in sharded_manifests/manifest_N.json, or in
             tarred_audio_manifest.json with `shard_id: N` (as
             NeMo's convert_to_tarred_audio_dataset.py writes them)
Lhotse Shar  recording.N.tar of audio; its cuts are in cuts.N.jsonl.gz (Lhotse 1.33)

The members of a sample follow each other. The audio of one batch is on the disk at a time.
"""

import json
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

import fsspec
import pyarrow as pa

from sbkit.audio.io import SUFFIXES
from sbkit.base.errors import DataError
from sbkit.data.filesystem import iter_members, unpacking_errors_as_data_errors
from sbkit.data.lhotse_cuts import read_cut, read_json_lines
from sbkit.data.manifest import Clip, Excluded, Manifest, text_columns
from sbkit.data.tables import (
    ID_COLUMNS,
    OFFSET_COLUMN,
    PATH_COLUMNS,
    TEXT_COLUMNS,
    Table,
    TableOptions,
    find_column,
    to_manifest,
    to_text,
)

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
TEXT_SUFFIXES = (".json", ".txt")
MAX_TEXT_BYTES = 1 << 24
COPY_BYTES = 1 << 20
RECORDING = "recording"  # the field of Shar that has the audio of cuts
_SHARD = re.compile(r"(?P<field>[^/]*?)[._-]?(?P<number>\d+)\.(?:tar|tar\.gz|tgz)$")
_RANGE = re.compile(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)")
_SUB = re.compile(r"-sub\d+$")  # NeMo's name for another part of the same member

Entry = Mapping[str, Any]  # a row of NeMo, or a cut
Row = dict[str, str]


class Sample(NamedTuple):
    """The members of a tar with one name: its audio in a file, and the texts by suffix."""

    name: str  # without the suffix
    audio: Path | None
    texts: Mapping[str, bytes]


class _CheckedMember(tarfile.TarInfo):
    """A member whose header is right: at a wrong or missing one, tarfile just ends."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and not any(buf):  # the mark of the end
                raise
            raise tarfile.ReadError(f"{error}") from error


def expand_ranges(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges of numbers stands for, as NeMo writes them.

    >>> expand_ranges("a_{08..10}.tar"), expand_ranges("a__OP_0..1_CL_.tar")
    (['a_08.tar', 'a_09.tar', 'a_10.tar'], ['a_0.tar', 'a_1.tar'])
    """
    match = _RANGE.search(pattern)
    if match is None or int(match[1]) > int(match[2]):
        return [pattern]
    before, after = pattern[: match.start()], expand_ranges(pattern[match.end() :])
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [f"{before}{n:0{len(match[1])}}{end}" for n in numbers for end in after]


def select_tars(files: Iterable[str]) -> list[str]:
    """Return the tars of audio among files; of Lhotse Shar, only the tars of recordings."""
    tars = [file for file in files if file.endswith(TAR_SUFFIXES)]
    shar = {_folder_of(file) for file in tars if Path(file).name.startswith(f"{RECORDING}.")}
    return [
        file
        for file in tars
        if _folder_of(file) not in shar or Path(file).name.startswith(f"{RECORDING}.")
    ]


def manifest_of(file: str) -> str | None:
    """Return the file or URL of the rows or cuts of a tar; None if they are in the tar."""
    match = _SHARD.search(file)
    if not file.endswith(TAR_SUFFIXES) or match is None:
        return None
    number = match["number"]
    names = [f"cuts.{number}.jsonl.gz", f"cuts.{number}.jsonl"]
    if match["field"] != RECORDING:
        sharded = f"manifest_{int(number)}.json"
        names = [f"sharded_manifests/{sharded}", sharded, "tarred_audio_manifest.json"]
    filesystem, path = fsspec.url_to_fs(file)
    for name in names:
        if filesystem.exists(f"{_folder_of(path)}/{name}"):
            return f"{_folder_of(file)}/{name}"
    return None


def _folder_of(file: str) -> str:
    return file.rpartition("/")[0] or "."


def read_tar(
    file: str, audio_folder: Path, options: TableOptions, batch_rows: int
) -> Iterator[Manifest]:
    """Yield the clips of a tar in batches; their audio is in a folder until the next batch.

    Raises DataError if the tar is damaged, has links, leads out of its folder, or has no texts.
    """
    numbered = enumerate(_read_samples(file, audio_folder), start=1)
    manifest = manifest_of(file)
    if manifest is None:
        while batch := list(islice(numbered, batch_rows)):
            rows = ((number, _read_pair(sample, file, options)) for number, sample in batch)
            yield _to_manifest(file, rows, options)
            shutil.rmtree(audio_folder, ignore_errors=True)
        return
    entries = _read_entries(manifest, file)
    unused = {*entries}
    while batch := list(islice(numbered, batch_rows)):
        unused -= {_entry_name(sample, entries) for _, sample in batch}
        yield _to_manifest(file, _describe(batch, entries, options), options)
        shutil.rmtree(audio_folder, ignore_errors=True)
    detail = f"{manifest} has rows of it"
    excluded = tuple(Excluded(name, "no audio file", detail) for name in sorted(unused))
    yield replace(Manifest.of(()), excluded=excluded)


def _to_manifest(
    file: str, rows: Iterable[tuple[int, Row | Clip | Excluded]], options: TableOptions
) -> Manifest:
    """Collect the rows of samples, each with the number of its sample in the tar."""
    numbered = list(rows)
    clips = Manifest.of(row for _, row in numbered if not isinstance(row, dict))
    columns = [row for _, row in numbered if isinstance(row, dict)]
    if not columns:
        return clips
    numbers = [number for number, row in numbered if isinstance(row, dict)]
    table = Table(Path(file), pa.table(text_columns(columns)), numbers)
    rows_of_table = to_manifest(table, replace(options, path_column=PATH_COLUMNS[0]), str)
    return Manifest.join([clips, rows_of_table])


# ---- the members of a tar


def _read_samples(file: str, folder: Path) -> Iterator[Sample]:
    """Yield the samples of a tar; write the audio of each into a folder first."""
    failure = f"{file} is truncated, or not a tar file"
    with (
        unpacking_errors_as_data_errors(failure, fix="Copy it again."),
        fsspec.open(file, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|*", tarinfo=_CheckedMember) as tar,
    ):
        sample: Sample | None = None
        for number, member in enumerate(iter_members(tar)):
            _check_member(member, file)
            path = PurePosixPath(member.name)
            name = str(path.with_suffix(""))
            if sample is not None and sample.name != name:
                yield sample
                sample = None
            content = tar.extractfile(member)
            if content is None:  # a folder
                continue
            sample = sample or Sample(name, None, {})
            if path.suffix.lower() in SUFFIXES:
                target = folder / str(number) / path.name
                target.parent.mkdir(parents=True)
                with target.open("wb") as audio:
                    shutil.copyfileobj(content, audio, COPY_BYTES)
                sample = sample._replace(audio=target)
            elif path.suffix in TEXT_SUFFIXES and member.size <= MAX_TEXT_BYTES:
                texts = {**sample.texts, path.suffix: content.read()}
                sample = sample._replace(texts=texts)
        if sample is not None:
            yield sample


def _check_member(member: tarfile.TarInfo, file: str) -> None:
    path = PurePosixPath(member.name)
    name = member.name[:200]
    if path.is_absolute() or ".." in path.parts:
        raise DataError(
            f"{file} is not read, because its member {name!r} leads out of its folder. Get it from "
            "a source that you trust."
        )
    if not member.isfile() and not member.isdir():
        raise DataError(
            f"{file} is not read, because its member {name!r} is a link or a device. Write the "
            "tar with files: tar --dereference --hard-dereference"
        )


# ---- texts in the tar


def _read_pair(sample: Sample, file: str, options: TableOptions) -> Row | Excluded:
    """Return the columns of a sample of WebDataset."""
    if sample.audio is None:
        return Excluded(sample.name, "no audio file", f"only {', '.join(sample.texts)}")
    if not sample.texts and options.text_column is not False:
        raise DataError(
            f"{file} has no .json or .txt beside {sample.audio.name}, and beside the tar there is "
            "no manifest of NeMo (sharded_manifests/manifest_N.json, tarred_audio_manifest.json) "
            "or Lhotse (cuts.N.jsonl.gz). Add one, or pass --text_column=False."
        )
    try:
        values = json.loads(sample.texts.get(".json", b"{}"))
        if not isinstance(values, dict):
            raise TypeError("it is not an object with keys")
        text = sample.texts.get(".txt", b"").decode("utf-8-sig").strip()
    except (ValueError, TypeError) as error:
        return Excluded(sample.name, "not a JSON object or UTF-8 text", str(error))
    row = {ID_COLUMNS[0]: sample.name, **values}
    row.pop(OFFSET_COLUMN, None)  # describes the file that the clip was cut from
    # One column for all samples: some may have their text in .json and others in .txt.
    column = find_column([*row], options.text_column or None, TEXT_COLUMNS)
    if column or ".txt" in sample.texts:
        row[options.text_column or TEXT_COLUMNS[0]] = row.pop(column) if column else text
    return _to_row(row, sample.audio)


def _to_row(values: Entry, audio: Path) -> Row:
    """Return the columns of a row; the audio is in the tar, wherever it was before."""
    row = {name: to_text(value) for name, value in values.items() if name not in PATH_COLUMNS}
    return {**row, PATH_COLUMNS[0]: str(audio)}


# ---- texts in a manifest


def _read_entries(manifest: str, file: str) -> dict[str, list[Entry]]:
    """Return the rows of NeMo or the cuts of Shar by the name of their member."""
    match = _SHARD.search(file)
    number = int(match["number"]) if match else 0
    entries: dict[str, list[Entry]] = {}
    for line, entry in read_json_lines(manifest):
        if not isinstance(entry, dict):
            raise DataError(f"Line {line} of {manifest} is not a JSON object. Correct it.")
        name = entry.get("id") if "supervisions" in entry else entry.get("audio_filepath")
        if not isinstance(name, str):
            raise DataError(
                f"Line {line} of {manifest} names no member of a tar: it is neither a row of NeMo "
                "with audio_filepath nor a cut of Lhotse. Correct it."
            )
        if "supervisions" not in entry:
            name = _SUB.sub("", str(PurePosixPath(name).with_suffix("")))
        if entry.get("shard_id", number) == number:
            entries.setdefault(name, []).append(entry)
    return entries


def _entry_name(sample: Sample, entries: Mapping[str, Sequence[Entry]]) -> str:
    """Return the name of a sample in a manifest; NeMo's lacks ``-subN``."""
    return sample.name if sample.name in entries else _SUB.sub("", sample.name)


def _describe(
    batch: Iterable[tuple[int, Sample]],
    entries: Mapping[str, Sequence[Entry]],
    options: TableOptions,
) -> Iterator[tuple[int, Row | Clip | Excluded]]:
    """Yield the clips of samples; a member that the manifest leaves out is left out."""
    for number, sample in batch:
        for entry in entries.get(_entry_name(sample, entries), ()):
            if sample.audio is None:
                yield number, Excluded(sample.name, "no audio file", "only its texts")
            elif "supervisions" in entry:
                for clip in read_cut(entry, str(sample.audio), options):
                    yield number, clip
            else:
                yield number, _to_row(entry, sample.audio)

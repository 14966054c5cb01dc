"""Read tars of clips as a stream: pairs of WebDataset, and NeMo's tarred manifests.

members -> samples, which WebDataset groups by name -> rows of tables, whose audio is in files

WebDataset   KEY.flac with KEY.json, an object, or KEY.txt
NeMo         audio_N.tar of audio; its rows are in sharded_manifests/manifest_N.json, or in
             tarred_audio_manifest.json with `shard_id: N`
"""

import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Self

import fsspec

from sbkit.audio.io import SUFFIXES as AUDIO_SUFFIXES
from sbkit.base.errors import DataError
from sbkit.base.imports import require_package
from sbkit.data.columns import (
    ID_COLUMNS,
    PATH_COLUMNS,
    TEXT_COLUMNS,
    find_columns,
    find_part_columns,
)
from sbkit.data.filesystem import find_beside, iter_members, unpacking_errors
from sbkit.data.manifest import Excluded
from sbkit.data.tables import (
    Row,
    Table,
    TableOptions,
    WriteAudio,
    collect_rows,
    is_missing,
    read_objects,
    to_text,
)

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_NUMBER = re.compile(r"(\d+)\.(?:tar|tar\.gz|tgz)$")
_RANGE = re.compile(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)")
_SUB = re.compile(r"-sub\d+$")  # NeMo's name for another part of the same member

Sample = Mapping[str, Any]  # the bytes of its members by suffix, and its name as `__key__`


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


def nemo_manifest(file: str) -> str | None:
    """Return the manifest of a tar of NeMo, a file or URL; None for any other tar."""
    match = _NUMBER.search(file)
    if match is None:
        return None
    sharded = f"manifest_{int(match[1])}.json"
    names = (f"sharded_manifests/{sharded}", sharded, "tarred_audio_manifest.json")
    return find_beside(file, names)


def read_tar(
    file: str, options: TableOptions, batch_rows: int, write_audio: WriteAudio
) -> Iterator[Table]:
    """Yield the rows of a tar, once their audio is written."""
    manifest = nemo_manifest(file)
    rows_of_member = None if manifest is None else _read_manifest(manifest, file)
    unused = {*(rows_of_member or ())}
    numbered = enumerate(_read_samples(file), start=1)
    while batch := list(islice(numbered, batch_rows)):
        unused -= {sample["__key__"] for _, sample in batch}
        rows = (
            (number, row)
            for number, sample in batch
            for row in _read_sample(sample, rows_of_member, options, write_audio)
        )
        yield collect_rows(Path(file), rows)
    if unused:
        detail = f"{manifest} has rows of it"
        lost = ((0, Excluded(name, "no audio file", detail)) for name in sorted(unused))
        yield collect_rows(Path(file), lost)


def _read_samples(file: str) -> Iterator[Sample]:
    group_by_keys = require_package("webdataset", extra="corpora").tariterators.group_by_keys
    with (
        unpacking_errors(file, "is damaged, or not a tar file", fix="Copy it again."),
        fsspec.open(file, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|*", tarinfo=_CheckedMember) as tar,
    ):
        yield from group_by_keys(_read_members(tar, file))


def _read_members(tar: tarfile.TarFile, file: str) -> Iterator[dict[str, Any]]:
    for member in iter_members(tar):
        if not member.isfile() and not member.isdir():
            raise DataError(
                f"{file} is not read: its member {member.name[:200]!r} is a link or a device. "
                "Write the tar by: tar --dereference --hard-dereference"
            )
        if content := tar.extractfile(member):
            yield {"fname": member.name, "data": content.read(), "__url__": file}


def _read_sample(
    sample: Sample,
    rows_of_member: Mapping[str, Iterable[Row]] | None,
    options: TableOptions,
    write_audio: WriteAudio,
) -> Iterator[Row | Excluded]:
    """Yield the rows of a sample; one that NeMo's manifest leaves out has none."""
    name = sample["__key__"]
    suffixes = [suffix for suffix in sample if not suffix.startswith("__")]
    audio = [suffix for suffix in suffixes if f".{suffix.rpartition('.')[2]}" in AUDIO_SUFFIXES]
    if rows_of_member is not None and name not in rows_of_member:
        return
    if len(audio) != 1:
        reason = "several audio files" if audio else "no audio file"
        yield Excluded(name, reason, f"it consists of {', '.join(suffixes)}")
        return
    path = {PATH_COLUMNS[0]: str(write_audio(sample[audio[0]], f"{name}.{audio[0]}"))}
    if rows_of_member is not None:
        yield from ({**row, **path} for row in rows_of_member[name])
        return
    row = _read_texts(sample, options)
    yield row if isinstance(row, Excluded) else {**row, **path}


def _read_texts(sample: Sample, options: TableOptions) -> Row | Excluded:
    name = sample["__key__"]
    try:
        values = json.loads(sample.get("json", b"{}"))
        if not isinstance(values, dict):
            raise TypeError("it is not an object with keys")
        text = sample.get("txt", b"").decode("utf-8-sig").strip()
    except (ValueError, TypeError) as error:
        return Excluded(name, "not a JSON object or UTF-8 text", str(error))
    # A path or times are of the file that the clip was cut from.
    origin_keys = (*PATH_COLUMNS, *find_part_columns([*values])[::2])
    row = {key: to_text(value) for key, value in values.items() if key not in origin_keys}
    row[ID_COLUMNS[0]] = name
    if options.text_column is False:
        return row
    columns = find_columns([*row], options.text_column, TEXT_COLUMNS)
    if not columns and "txt" not in sample:
        detail = "neither .txt nor .json has a text; for none at all, set `text_column: False`"
        return Excluded(name, "no transcript", detail)
    for column in columns:
        if not (isinstance(values[column], str) or is_missing(values[column])):
            type_name = type(values[column]).__name__
            return Excluded(name, "a transcript that is no text", f"{row[column]} is {type_name}")
    # One column for all samples: some may have their text in .json and others in .txt.
    texts = [*(row.pop(column) for column in columns), text]
    row[options.text_column or TEXT_COLUMNS[0]] = next(filter(str.strip, texts), "")
    return row


def _read_manifest(manifest: str, file: str) -> dict[str, list[Row]]:
    """Return the rows of a tar of NeMo by the name of their member."""
    match = _NUMBER.search(file)
    number = str(int(match[1])) if match else ""
    rows_of_member: dict[str, list[Row]] = {}
    with fsspec.open(manifest, "rt", encoding="utf-8-sig") as lines:
        for table in read_objects(Path(manifest), lines):
            for row in table.excluded:
                raise DataError(f"{manifest}: {row.id} is {row.reason} ({row.detail}).")
            for row in table.rows.to_pylist():
                member = PurePosixPath(row.pop("audio_filepath", None) or "")
                if not member.name:
                    raise DataError(f"{manifest} has a row without `audio_filepath`.")
                name = str(member.with_name(_SUB.sub("", member.name.partition(".")[0])))
                if row.get("shard_id") in (None, number):
                    values = {column: text for column, text in row.items() if text is not None}
                    rows_of_member.setdefault(name, []).append(values)
    return rows_of_member

"""What a corpus lists: clips with their sentences and columns, and the rows that cannot be used.

Clips of a corpus: one as an object, many as columns.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.data.shard import AUDIO
from sbkit.text.languages import primary

ROWS_AT_ONCE = 50_000
COUNT = "id"  # no clip's own column; a table without columns would have no rows
_OWN = pa.schema({"id": pa.string(), "path": pa.binary(), "sentence": pa.string()})


@dataclass(frozen=True, slots=True)
class Clip:
    """One utterance of a corpus.

    Attributes:
        id: unique within its manifest; the file name without extension where that is unique.
        path: the audio file.
        sentence: the transcript as the corpus writes it.
        columns: every other column of the manifest; the speaker is always ``speaker``.
    """

    id: str
    path: Path
    sentence: str
    columns: Mapping[str, str] = field(default_factory=dict)


class Clips:
    """Clips in columns of Arrow; one becomes an object when it is asked for.

    Two million of Common Voice take 1.2 GB, which would be 4 GB as objects.

    Attributes:
        own: the columns id, path and sentence.
        columns: every other column, null where a clip has none.
    """

    def __init__(self, own: pa.Table, columns: pa.Table) -> None:
        self.own, self.columns = own, columns

    @classmethod
    def of(cls, clips: "Iterable[Clip] | Clips") -> "Clips":
        """Arrange clips in columns, unless they are."""
        if isinstance(clips, Clips):
            return clips
        left = iter(clips)
        return cls.join(map(_arrange, iter(lambda: list(islice(left, ROWS_AT_ONCE)), [])))

    @classmethod
    def join(cls, parts: "Iterable[Clips]") -> "Clips":
        """Return the clips of all parts, which may have different columns."""
        own, columns = [_OWN.empty_table()], [pa.table({COUNT: pa.nulls(0)})]
        for part in parts:
            own.append(part.own.cast(_OWN))
            count = pa.nulls(len(part))
            has_any = part.columns.num_columns > 0
            columns.append(
                part.columns.append_column(COUNT, count) if has_any else pa.table({COUNT: count})
            )
        joined = pa.concat_tables(columns, promote_options="default")
        return cls(pa.concat_tables(own), joined.drop_columns([COUNT]))

    @property
    def ids(self) -> list[str]:
        """Return the id of every clip."""
        ids: list[str] = self.own["id"].to_pylist()
        return ids

    @property
    def paths(self) -> Iterator[str]:
        """Yield the audio file of every clip."""
        return decode_paths(self.own["path"])

    @property
    def sentences(self) -> list[str]:
        """Return the transcript of every clip."""
        sentences: list[str] = self.own["sentence"].to_pylist()
        return sentences

    def renamed(self, ids: Sequence[str]) -> "Clips":
        """Return the clips with other ids."""
        return Clips(self.own.set_column(0, "id", pa.array(ids, pa.string())), self.columns)

    def take(self, rows: Any) -> "Clips":
        """Return some of the clips, in the order of ``rows``; all of them are not copied."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        places = pa.array(rows, pa.int64())
        return Clips(self.own.take(places), self.columns.take(places))

    def __getitem__(self, index: int) -> Clip:
        """Return one clip."""
        place = range(len(self))[index]
        return next(_objects(self.own.slice(place, 1), self.columns.slice(place, 1)))

    def __iter__(self) -> Iterator[Clip]:
        """Yield one clip after the other."""
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from _objects(
                self.own.slice(start, ROWS_AT_ONCE), self.columns.slice(start, ROWS_AT_ONCE)
            )

    def __len__(self) -> int:
        """Count the clips."""
        return len(self.own)


def decode_paths(column: pa.ChunkedArray) -> Iterator[str]:
    """Yield the paths of a column of bytes; each becomes a string when it is its turn."""
    for start in range(0, len(column), ROWS_AT_ONCE):
        yield from map(os.fsdecode, column.slice(start, ROWS_AT_ONCE).to_pylist())


def _arrange(clips: Sequence[Clip]) -> Clips:
    names = dict.fromkeys(name for clip in clips for name in clip.columns)
    own = [(clip.id, os.fsencode(clip.path), clip.sentence) for clip in clips]
    columns = {
        name: pa.array([clip.columns.get(name) for clip in clips], pa.string()) for name in names
    }
    table = pa.table([pa.array(each) for each in zip(*own, strict=True)], schema=_OWN)
    return Clips(table, pa.table(columns))


def _objects(own: pa.Table, columns: pa.Table) -> Iterator[Clip]:
    others = columns.to_pylist() if columns.num_columns else [{}] * len(own)
    fields = (own[name].to_pylist() for name in _OWN.names)
    for id, path, sentence, row in zip(*fields, others, strict=True):
        kept = {name: value for name, value in row.items() if value is not None}
        yield Clip(id, Path(os.fsdecode(path)), sentence, kept)


# What sbkit calls its own columns: those of a prepared split, then what a batch adds.
RESERVED_COLUMNS = ("id", "text", "sentence", "samples", AUDIO, "percent", "weight")
SPEAKER_COLUMNS = ("speaker", "client_id", "speaker_id", "spk_id", "spk")


@dataclass(frozen=True)
class BadRow:
    """One row that names no clip that can be used; ``id`` says where it stands."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Manifest:
    """The rows of one split, in the order of its corpus.

    stored: of clips whose audio is in shards already: samples, digest and place of each.
    """

    clips: Sequence[Clip] | Clips
    bad_rows: tuple[BadRow, ...]
    stored: pa.Table | None = None


def collect(rows: Iterable[Clip | BadRow], *bases: Path) -> Manifest:
    """Return the manifest of the rows read, in which every clip and every id comes once."""
    bad: list[BadRow] = []
    return distinct(Clips.of(_good(rows, bad)), bad, *bases)


def _good(rows: Iterable[Clip | BadRow], bad: list[BadRow]) -> Iterator[Clip]:
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            yield row


def join_manifests(parts: Sequence[tuple[str, Manifest]], *bases: Path) -> Manifest:
    """Return the rows of all parts; their names say where a bad row of several is from."""
    bad = [
        replace(row, id=f"{name} {row.id}") if len(parts) > 1 else row
        for name, part in parts
        for row in part.bad_rows
    ]
    return distinct(Clips.join(Clips.of(part.clips) for _, part in parts), bad, *bases)


def distinct(clips: Clips, bad_rows: Sequence[BadRow], *bases: Path) -> Manifest:
    """Return a manifest in which every clip and every id comes once.

    A clip that is listed again is a bad row. Clips of different files that share an id are called
    by their path, relative to the first of ``bases`` where it lies.
    """
    bad, once = [*bad_rows], dict[str, int]()
    if len(pc.unique(clips.own["path"])) < len(clips):
        for place, path in enumerate(clips.paths):
            if once.setdefault(path, place) != place:
                detail = f"a row before it names {Path(path).name}"
                bad.append(BadRow(clips[place].id, "clip listed twice", detail))
        clips = clips.take([*once.values()])
    if len(pc.unique(clips.own["id"])) < len(clips):
        ids, counts = clips.ids, Counter(clips.ids)
        clips = clips.renamed(
            [
                id if counts[id] == 1 else _by_path(Path(path), bases)
                for id, path in zip(ids, clips.paths, strict=True)
            ]
        )
    return Manifest(clips, tuple(bad))


def _by_path(path: Path, bases: Sequence[Path]) -> str:
    inside = (path.relative_to(base) for base in bases if path.is_relative_to(base))
    return next(inside, path).as_posix()


def open_names(names: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Return what the columns that a clip keeps, all but those used, are called, by their names.

    The speaker's column is called ``speaker``. A name that prepared splits use themselves gets the
    prefix ``manifest_``.
    """
    kept = [name for name in names if name not in used]
    lower = {name.lower(): name for name in kept}
    speaker = next((lower[name] for name in SPEAKER_COLUMNS if name in lower), None)
    return {name: "speaker" if name == speaker else free_name(name) for name in kept}


def free_name(name: str) -> str:
    """Return what a column is called so that it is none of sbkit's own."""
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name


def check_locale(manifest: Manifest, language: str) -> None:
    """Raise SbkitError where more than half of the rows with a locale have another one.

    Rows without a locale say nothing, and a region makes no difference.
    """
    columns = Clips.of(manifest.clips).columns
    if "locale" not in columns.column_names:
        return
    counts = Counter[str]()
    for entry in columns["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    del counts[""]
    others = {tag: n for tag, n in counts.items() if primary(tag) != primary(language)}
    if 2 * sum(others.values()) > counts.total():
        most = max(others, key=others.__getitem__)
        raise SbkitError(
            f"`language` must be the language of the manifest, but is {language} where "
            f"{others[most]} of {counts.total()} rows have the locale {most}. Pass "
            f"--language={most}."
        )


@dataclass(frozen=True)
class Excluded:
    """One utterance that a run does without, and why."""

    split: str
    id: str
    reason: str
    detail: str

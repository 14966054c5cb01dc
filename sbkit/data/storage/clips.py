"""Clips of a corpus: one as an object, many as columns."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

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

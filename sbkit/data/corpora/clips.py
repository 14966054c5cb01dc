"""Clips of a corpus: one as an object, many as columns."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

ROWS_AT_ONCE = 50_000
COUNT = "id"  # no clip's own column; a table without columns would have no rows
_OWN = pa.schema({"id": pa.string(), "path": pa.binary(), "sentence": pa.string()})
_NO_COLUMNS = pa.table({COUNT: pa.nulls(0)})


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


@dataclass(frozen=True)
class Paths:
    """Paths of files in a column; each becomes a string when it is its turn."""

    column: pa.ChunkedArray

    def __iter__(self) -> Iterator[str]:
        """Yield one path after the other."""
        for start in range(0, len(self.column), ROWS_AT_ONCE):
            yield from map(os.fsdecode, self.column.slice(start, ROWS_AT_ONCE).to_pylist())

    def __len__(self) -> int:
        """Count the paths."""
        return len(self.column)


class Clips(Sequence[Clip]):
    """Clips in columns of Arrow; one becomes an object when it is asked for.

    Two million of Common Voice take 1.2 GB, which would be 4 GB as objects.

    Attributes:
        own: the columns id, path and sentence.
        columns: every other column, null where a clip has none.
    """

    def __init__(self, own: pa.Table, columns: pa.Table) -> None:
        self.own, self.columns = own, columns

    @classmethod
    def of(cls, clips: Iterable[Clip]) -> "Clips":
        """Arrange clips in columns, unless they are."""
        if isinstance(clips, Clips):
            return clips
        own, columns, left = list[pa.Table](), list[pa.Table](), iter(clips)
        while some := list(islice(left, ROWS_AT_ONCE)):
            own.append(
                pa.table(
                    {
                        "id": pa.array([clip.id for clip in some], pa.string()),
                        "path": pa.array([os.fsencode(clip.path) for clip in some], pa.binary()),
                        "sentence": pa.array([clip.sentence for clip in some], pa.string()),
                    }
                )
            )
            names = dict.fromkeys(name for clip in some for name in clip.columns)
            values = {
                name: pa.array([clip.columns.get(name) for clip in some], pa.string())
                for name in names
            }
            columns.append(pa.table({**values, COUNT: pa.nulls(len(some))}))
        joined = pa.concat_tables([_NO_COLUMNS, *columns], promote_options="default")
        return cls(pa.concat_tables([_OWN.empty_table(), *own]), joined.drop_columns([COUNT]))

    @property
    def ids(self) -> list[str]:
        """Return the id of every clip."""
        return self._values("id")

    @property
    def paths(self) -> "Paths":
        """Return the audio file of every clip."""
        return Paths(self.own["path"])

    @property
    def sentences(self) -> list[str]:
        """Return the transcript of every clip."""
        return self._values("sentence")

    def _values(self, name: str) -> list[Any]:
        values: list[Any] = self.own[name].to_pylist()
        return values

    def renamed(self, ids: Sequence[str]) -> "Clips":
        """Return the clips with other ids."""
        return Clips(self.own.set_column(0, "id", pa.array(ids, pa.string())), self.columns)

    @overload
    def __getitem__(self, index: int) -> Clip: ...

    @overload
    def __getitem__(self, index: slice) -> "Clips": ...

    def __getitem__(self, index: int | slice) -> "Clip | Clips":
        """Return one clip, or some."""
        if isinstance(index, slice):
            rows = pa.array(range(*index.indices(len(self))), pa.int64())
            return Clips(self.own.take(rows), self.columns.take(rows))
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

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of clips."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(
            one == another for one, another in zip(self, other, strict=True)
        )


def _objects(own: pa.Table, columns: pa.Table) -> Iterator[Clip]:
    names = columns.column_names
    values = (
        zip(*(columns[name].to_pylist() for name in names), strict=True)
        if names
        else iter([()] * len(own))
    )
    fields = (own[name].to_pylist() for name in ("id", "path", "sentence"))
    for id, path, sentence, others in zip(*fields, values, strict=True):
        kept = {name: value for name, value in zip(names, others, strict=True) if value is not None}
        yield Clip(id, Path(os.fsdecode(path)), sentence, kept)

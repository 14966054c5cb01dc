"""The manifest of a split: its clips with their transcripts and columns, and the excluded rows."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import DataError
from sbkit.text.languages import primary_language

MIX_SOURCE = "mix_source"  # of a training set with a `mix`: the index of the row's source
# The columns of a prepared split, and the two that a batch adds.
RESERVED_COLUMNS = ("id", "text", "sentence", "samples", "audio", "percent", "weight", MIX_SOURCE)
SPEAKER_COLUMNS = ("speaker", "client_id", "speaker_id", "spk_id", "spk")
BATCH_ROWS = 50_000  # rows that are Python objects at the same time
# Of every manifest; ``audio`` is the path. They are reserved names, so no other column has them.
_SCHEMA = pa.schema({"id": pa.string(), "audio": pa.binary(), "sentence": pa.string()})


@dataclass(frozen=True, slots=True)
class Clip:
    """One utterance of a corpus."""

    id: str  # unique in its manifest; the file name without extension where that is unique
    path: Path  # of the audio file
    sentence: str  # the transcript as the corpus writes it
    columns: Mapping[str, str] = field(default_factory=dict)  # the speaker is always ``speaker``


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row of a manifest, or an utterance of a split, that a run does not use."""

    id: str  # of the utterance, or the position of a row that names none
    reason: str  # a few words, the same for all rows with the same fault
    detail: str  # the fault of this row
    split: str = ""  # until the manifest becomes a split


@dataclass(frozen=True, eq=False)
class Manifest:
    """The clips of one split in a table of Arrow; a clip becomes an object when it is read.

    Two million clips of Common Voice take 1.2 GB; as objects they would take 4 GB.

    >>> manifest = Manifest.of([Clip("a", Path("/data/a.wav"), "Hello.", {"speaker": "ann"})])
    >>> len(manifest), manifest[0].columns["speaker"], manifest.sentences
    (1, 'ann', ['Hello.'])
    """

    rows: pa.Table  # id, audio (a path), sentence, and other columns, null where a clip has none
    excluded: tuple[Excluded, ...] = ()  # rows of the corpus that name no usable clip
    stored: pa.Table | None = None  # of audio that is in shards: samples, digest and location

    @classmethod
    def of(cls, rows: Iterable[Clip | Excluded], *bases: Path) -> Self:
        """Collect clips and excluded rows; every clip and every id is kept once, as `distinct`."""
        rows = iter(rows)
        batches = iter(lambda: list(islice(rows, BATCH_ROWS)), [])
        return cls.join(map(cls._from_batch, batches)).distinct(*bases)

    @classmethod
    def _from_batch(cls, batch: Sequence[Clip | Excluded]) -> Self:
        clips = [row for row in batch if isinstance(row, Clip)]
        columns = {
            "id": pa.array([clip.id for clip in clips], pa.string()),
            "audio": pa.array([os.fsencode(clip.path) for clip in clips], pa.binary()),
            "sentence": pa.array([clip.sentence for clip in clips], pa.string()),
        }
        others = text_columns([clip.columns for clip in clips])
        columns |= {unreserved_name(name): column for name, column in others.items()}
        return cls(pa.table(columns), tuple(row for row in batch if isinstance(row, Excluded)))

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Return the rows of all parts, which may have different columns."""
        tables = [_SCHEMA.empty_table()]
        excluded = list[Excluded]()
        for part in parts:
            tables.append(part.rows)
            excluded += part.excluded
        return cls(pa.concat_tables(tables, promote_options="default"), tuple(excluded))

    @classmethod
    def join_named(cls, parts: Sequence[tuple[str, Self]], *bases: Path) -> Self:
        """Return the distinct rows of all parts; the ids of excluded rows start with the name.

        A single part needs no name.
        """
        joined = cls.join(part for _, part in parts)
        if len(parts) > 1:
            named = (replace(row, id=f"{name} {row.id}") for name, p in parts for row in p.excluded)
            joined = replace(joined, excluded=tuple(named))
        return joined.distinct(*bases)

    def distinct(self, *bases: Path) -> Self:
        """Exclude clips that are listed again, and make ids unique.

        Clips that share an id are called by their path, relative to the first of ``bases`` that
        contains it.
        """
        manifest = self
        excluded = [*self.excluded]
        if len(pc.unique(self.rows["audio"])) < len(self):
            first_rows: dict[str, int] = {}
            for row, path in enumerate(self.paths):
                if first_rows.setdefault(path, row) != row:
                    detail = f"a row before it names {Path(path).name}"
                    excluded.append(Excluded(self[row].id, "clip listed twice", detail))
            manifest = self.take([*first_rows.values()])
        rows = manifest.rows
        if len(pc.unique(rows["id"])) < len(manifest):
            counts = Counter(manifest.ids)
            ids = [
                id if counts[id] == 1 else _relative_name(Path(path), bases)
                for id, path in zip(manifest.ids, manifest.paths, strict=True)
            ]
            rows = rows.set_column(0, "id", pa.array(ids, pa.string()))
        return replace(manifest, rows=rows, excluded=tuple(excluded))

    @property
    def ids(self) -> list[str]:
        return to_texts(self.rows["id"])

    @property
    def paths(self) -> Iterator[str]:
        return decode_paths(self.rows["audio"])

    @property
    def sentences(self) -> list[str]:
        return to_texts(self.rows["sentence"])

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Self:
        """Return the clips with these indices, in this order; copy nothing if these are all."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        indices = pa.array(rows, pa.int64())
        stored = self.stored and self.stored.take(indices)
        return replace(self, rows=self.rows.take(indices), stored=stored)

    def __getitem__(self, index: int) -> Clip:
        return next(self._clips(range(len(self))[index], 1))

    def __iter__(self) -> Iterator[Clip]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self._clips(start, BATCH_ROWS)

    def __len__(self) -> int:
        return len(self.rows)

    def _clips(self, start: int, count: int) -> Iterator[Clip]:
        for row in self.rows.slice(start, count).to_pylist():
            id, path, sentence = map(row.pop, _SCHEMA.names)
            columns = {name: value for name, value in row.items() if value is not None}
            yield Clip(id, Path(os.fsdecode(path)), sentence, columns)


def text_columns(rows: Sequence[Mapping[str, str]]) -> dict[str, pa.Array]:
    """Return texts by column, null where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}


def to_texts(column: pa.ChunkedArray) -> list[str]:
    """Return a column of text as strings."""
    texts: list[str] = column.to_pylist()
    return texts


def decode_paths(column: pa.ChunkedArray) -> Iterator[str]:
    """Yield the paths of a column of bytes as strings."""
    for start in range(0, len(column), BATCH_ROWS):
        yield from map(os.fsdecode, column.slice(start, BATCH_ROWS).to_pylist())


def _relative_name(path: Path, bases: Sequence[Path]) -> str:
    inside = (path.relative_to(base) for base in bases if path.is_relative_to(base))
    return next(inside, path).as_posix()


def rename_columns(names: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Map the names of a corpus's columns, except those used for the clip, to sbkit's names.

    The speaker's column becomes ``speaker``. A reserved name gets the prefix ``manifest_``.
    """
    unused = [name for name in names if name not in used]
    lower = {name.lower(): name for name in unused}
    speaker = next((lower[name] for name in SPEAKER_COLUMNS if name in lower), None)
    return {name: "speaker" if name == speaker else unreserved_name(name) for name in unused}


def unreserved_name(name: str) -> str:
    """Return the name of a corpus's column, with the prefix ``manifest_`` if it is reserved."""
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name


def check_locale(manifest: Manifest, language: str) -> None:
    """Check that at least half of the rows with a locale have this language, in any region."""
    if "locale" not in manifest.rows.column_names:
        return
    counts = Counter[str]()
    for entry in manifest.rows["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    del counts[""]
    foreign = {
        tag: n for tag, n in counts.items() if primary_language(tag) != primary_language(language)
    }
    if 2 * sum(foreign.values()) > counts.total():
        locale = max(foreign, key=foreign.__getitem__)
        raise DataError(
            f"`language` is {language}, but {foreign[locale]} of {counts.total()} rows of the "
            f"manifest have the locale {locale}. Pass --language={locale}."
        )

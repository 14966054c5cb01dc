"""The manifest of a split: its clips with their transcripts and columns, and the excluded rows."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.io import AudioSpan
from sbkit.base.arrays import Bools, Counts
from sbkit.base.errors import DataError, concerning
from sbkit.base.messages import shorten
from sbkit.text.languages import SEVERAL_LANGUAGES, primary_language

CHANNEL_FAULT = "mix_fault"  # a column: the audio that a downmix of channels loses (`Downmixer`)
MIX_SOURCE = "mix_source"  # a column, if there is a `mix`: the index of the row's training source
STORED_COLUMN = "stored"  # if audio is in shards already: its samples, digest and location
# The columns of spans and channels of files: microseconds, and the channel, counted from 0.
SPAN_COLUMNS = ("part_start", "part_end", "part_channel")
# The columns of a prepared split, of batches (percent, weight), of mixes and of spans.
RESERVED_COLUMNS = (
    *("id", "text", "sentence", "samples", "audio", "percent", "weight", MIX_SOURCE),
    *(CHANNEL_FAULT, STORED_COLUMN),
    *SPAN_COLUMNS,
)
MAX_QUOTED_CHARACTERS = 250  # of an excluded row
MAX_OVERLAP = 10_000  # microseconds that two spans may share, because tools round
DURATION_COLUMN = "duration_ms"  # the duration that the corpus states, as text
BATCH_ROWS = 50_000  # rows that are Python objects at the same time
BLOCK_ROWS = 100_000  # rows of a split that are in memory at the same time
# The columns of every manifest; ``audio`` is the path. The names are reserved for them.
_MANIFEST_SCHEMA = pa.schema({"id": pa.string(), "audio": pa.binary(), "sentence": pa.string()})


@dataclass(frozen=True, slots=True)
class Clip:
    """One utterance of a corpus."""

    id: str  # unique in its manifest; the file name without extension if that is unique
    path: Path  # of the audio file
    sentence: str  # the transcript as the corpus writes it
    columns: Mapping[str, str] = field(default_factory=dict)  # the speaker is always ``speaker``
    start: int = 0  # microseconds, if the clip is a span of its file
    end: int | None = None  # microseconds; None: the end of the file
    channel: int | None = None  # of the file, counted from 0; None: all channels are downmixed


@dataclass(frozen=True, slots=True)
class Excluded:
    """A row of a manifest, or an utterance of a split, that a run does not use."""

    id: str  # of the utterance, or the position of a row without an id
    reason: str  # a few words, the same for all rows with the same fault
    detail: str  # the fault of this row
    split: str = ""  # set once the manifest becomes a split

    def __post_init__(self) -> None:
        for name in ("id", "detail"):  # they may quote a cell of any size
            object.__setattr__(self, name, shorten(getattr(self, name), MAX_QUOTED_CHARACTERS))


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
    filtered: Mapping[str, int] = field(default_factory=dict)  # counts of filtered rows, by reason

    @classmethod
    def of(cls, rows: Iterable[Clip | Excluded], *bases: Path) -> Self:
        """Collect clips and excluded rows, and make the clips `distinct`."""
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
        spans = [AudioSpan("", clip.start, clip.end, clip.channel) for clip in clips]
        if not all(span.is_file for span in spans):
            columns |= span_columns(spans)
        other_columns = text_columns([clip.columns for clip in clips])
        columns |= {unreserved_name(name): column for name, column in other_columns.items()}
        return cls(pa.table(columns), tuple(row for row in batch if isinstance(row, Excluded)))

    @classmethod
    def join(cls, manifests: Iterable[Self]) -> Self:
        """Join the rows of manifests, which may have different columns."""
        tables = [_MANIFEST_SCHEMA.empty_table()]
        excluded = list[Excluded]()
        filtered = Counter[str]()
        for manifest in manifests:
            tables.append(manifest.rows)
            excluded += manifest.excluded
            filtered.update(manifest.filtered)
        rows = pa.concat_tables(tables, promote_options="default")
        return cls(rows, tuple(excluded), filtered=filtered)

    @classmethod
    def join_named(cls, manifests: Sequence[tuple[str, Self]], *bases: Path) -> Self:
        """Join the distinct rows of manifests, and add names to the ids of excluded rows."""
        joined = cls.join(manifest for _, manifest in manifests)
        if len(manifests) > 1:
            excluded = [
                replace(row, id=f"{name} {row.id}")
                for name, manifest in manifests
                for row in manifest.excluded
            ]
            joined = replace(joined, excluded=tuple(excluded))
        return joined.distinct(*bases)

    def distinct(self, *bases: Path) -> Self:
        """Exclude clips that are listed twice or overlap, and make ids unique.

        Clips that share an id are named after their path, relative to the first of ``bases`` that
        contains it, and after their position if they are spans.
        """
        manifest = self.without_repeats()
        rows = manifest.rows
        if count_distinct(rows["id"]) < len(manifest):
            counts = Counter(manifest.ids)
            ids = manifest.ids
            for row, span in enumerate(manifest.spans):
                if counts[ids[row]] > 1:
                    path = Path(span.path)
                    names = (path.relative_to(base) for base in bases if path.is_relative_to(base))
                    ids[row] = span_name(next(names, path).as_posix(), span)
            rows = rows.set_column(0, "id", pa.array(ids, pa.string()))
        return replace(manifest, rows=rows)

    def without_repeats(self) -> Self:
        """Exclude clips that are listed twice or overlap; keep those with a text if possible."""
        if count_distinct(self.rows["audio"]) == len(self):
            return self
        excluded = [*self.excluded]
        first_rows: dict[AudioSpan, int] = {}
        ids = self.ids
        has_text = [bool(sentence.strip()) for sentence in self.sentences]
        rows = sorted(enumerate(self.spans), key=lambda row_and_span: not has_text[row_and_span[0]])
        for row, span in rows:
            if first_rows.setdefault(span, row) != row:
                detail = f"another row names {span}"
                excluded.append(Excluded(ids[row], "clip listed twice", detail))
        if self.has_spans:
            span_at = {row: span for span, row in first_rows.items()}
            for row, other in _find_overlapping(first_rows, has_text).items():
                span = span_at[row]
                detail = f"{span} overlaps {span_at[other]}, {ids[other]}"
                excluded.append(Excluded(ids[row], "span overlaps another", detail))
                del first_rows[span]
        return replace(self.take(sorted(first_rows.values())), excluded=tuple(excluded))

    def blocks(self) -> Iterator[Self]:
        """Yield the rows in blocks of `BLOCK_ROWS`; the first one has the left-out rows, too."""
        yield replace(self, rows=self.rows.slice(0, BLOCK_ROWS))
        for start in range(BLOCK_ROWS, len(self), BLOCK_ROWS):
            yield type(self)(self.rows.slice(start, BLOCK_ROWS))

    @property
    def ids(self) -> list[str]:
        return to_texts(self.rows["id"])

    @property
    def paths(self) -> Iterator[str]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from map(os.fsdecode, self.rows["audio"].slice(start, BATCH_ROWS).to_pylist())

    @property
    def has_spans(self) -> bool:
        """Whether any clip may be a span of its file."""
        return SPAN_COLUMNS[0] in self.rows.column_names

    @property
    def spans(self) -> Iterator[AudioSpan]:
        """Yield the path of every clip, with its position in the file and its channel."""
        if not self.has_spans:
            yield from map(AudioSpan, self.paths)
            return
        positions = (self.rows[name].to_pylist() for name in SPAN_COLUMNS)
        for path, start, end, channel in zip(self.paths, *positions, strict=True):
            yield AudioSpan(path, start or 0, end, channel)

    @property
    def sentences(self) -> list[str]:
        return to_texts(self.rows["sentence"])

    def filter(self, mask: Bools) -> Self:
        """Return the clips that a mask chooses."""
        return self if mask.all() else replace(self, rows=self.rows.filter(pa.array(mask)))

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Self:
        """Return the clips with these indices, in this order."""
        if np.array_equal(rows, np.arange(len(self))):
            return self
        return replace(self, rows=take_rows(self.rows, np.asarray(rows)))

    def __getitem__(self, index: int) -> Clip:
        return next(self._clips(range(len(self))[index], 1))

    def __iter__(self) -> Iterator[Clip]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self._clips(start, BATCH_ROWS)

    def __len__(self) -> int:
        return len(self.rows)

    def _clips(self, first: int, count: int) -> Iterator[Clip]:
        for row in self.rows.slice(first, count).to_pylist():
            id, path, sentence = map(row.pop, _MANIFEST_SCHEMA.names)
            row.pop(STORED_COLUMN, None)
            start, end, channel = (row.pop(name, None) for name in SPAN_COLUMNS)
            columns = {name: value for name, value in row.items() if value is not None}
            file = Path(os.fsdecode(path))
            yield Clip(id, file, sentence, columns, start or 0, end, channel)


def text_columns(rows: Sequence[Mapping[str, str]]) -> dict[str, pa.Array]:
    """Return texts by column, null where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}


def span_columns(spans: Iterable[AudioSpan]) -> dict[str, pa.Array]:
    """Return the start and the end of each clip in its file, and its channel, as columns."""
    positions = [span[1:] for span in spans]
    return {
        name: pa.array([position[index] for position in positions], pa.int64())
        for index, name in enumerate(SPAN_COLUMNS)
    }


def span_name(name: str, span: AudioSpan) -> str:
    """Append the channel of a span and its position, in milliseconds, to a name."""
    if span.channel is not None:
        name = f"{name}-ch{span.channel}"
    if span.is_whole:
        return name
    end = "end" if span.end is None else span.end // 1000
    return f"{name}-{span.start // 1000}-{end}"


def _find_overlapping(rows: Mapping[AudioSpan, int], has_text: Sequence[bool]) -> dict[int, int]:
    """Return the rows of spans that overlap a kept span, with the row of that kept span.

    As many spans as possible are kept: in each channel of a file, the span that ends first, then
    the first to end among spans that start after it, and so on. Spans without a text, which
    training leaves out, are compared only if no span has a text.
    """
    overlapping: dict[int, int] = {}
    last_kept: dict[tuple[str, int | None], AudioSpan] = {}  # by file and channel

    def end_of(span: AudioSpan) -> float:
        return math.inf if span.end is None else span.end

    candidates = [span for span, row in rows.items() if has_text[row]] or rows
    for span in sorted(candidates, key=lambda span: (end_of(span), -span.start)):
        last = last_kept.get((span.path, span.channel))
        if last and span.start < end_of(last) - MAX_OVERLAP:
            overlapping[rows[span]] = rows[last]
        else:
            last_kept[span.path, span.channel] = span
    return overlapping


def take_rows(table: pa.Table, rows: npt.NDArray[np.integer[Any]]) -> pa.Table:
    """Return rows of a table in this order; Arrow's own `take` refuses columns of over 2 GB."""
    large_schema = pa.schema([field.with_type(_large_type(field.type)) for field in table.schema])
    combined = table.cast(large_schema).combine_chunks()  # otherwise each `take` combines them
    starts = range(0, max(1, len(rows)), BLOCK_ROWS)
    blocks = (pa.array(rows[start : start + BLOCK_ROWS], pa.int64()) for start in starts)
    return pa.concat_tables(combined.take(block).cast(table.schema) for block in blocks)


def _large_type(type: pa.DataType) -> pa.DataType:
    """Return the type of Arrow for a column of such values that may exceed 2 GB."""
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_large_type(field.type)) for field in type])
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(type, type)


def count_distinct(column: pa.ChunkedArray) -> int:
    """Return the number of distinct values of a column of any size."""
    return len(pc.unique(column.cast(_large_type(column.type))))


def hash_texts(texts: pa.ChunkedArray) -> Counts:
    """Return hashes of 64 bits, which show repeated texts without keeping the texts."""
    return np.fromiter(map(hash, texts.to_pylist()), np.int64, len(texts))


def are_distinct(hashes: Sequence[Counts]) -> bool:
    """Return whether all texts of a split differ, by the hashes of its blocks."""
    split_hashes = np.concatenate(hashes)
    return len(np.unique(split_hashes)) == len(split_hashes)


def to_texts(column: pa.ChunkedArray) -> list[str]:
    """Return a column of text as strings."""
    texts: list[str] = column.to_pylist()
    return texts


def parse_durations(texts: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Return the column ``duration_ms`` as seconds, NaN where it is not a number above 0."""
    numbers = pc.if_else(pc.match_substring_regex(texts, r"^\d+(\.\d+)?$"), texts, None)
    seconds: npt.NDArray[np.float64] = numbers.cast(pa.float64()).to_numpy() / 1000
    return np.where(seconds > 0, seconds, np.nan)


def unreserved_name(name: str) -> str:
    """Return the name of a column, with the prefix ``manifest_`` if it is reserved."""
    return f"manifest_{name}" if name in RESERVED_COLUMNS else name


@concerning("language")
def check_locale(rows: pa.Table, language: str) -> None:
    """Raise DataError if most rows have the locale of another language."""
    if "locale" not in rows.column_names or language == SEVERAL_LANGUAGES:
        return
    counts = Counter[str]()
    for entry in rows["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    del counts[""]
    expected = primary_language(language)
    foreign_counts = {tag: n for tag, n in counts.items() if primary_language(tag) != expected}
    if 2 * sum(foreign_counts.values()) > counts.total():
        locale = max(foreign_counts, key=foreign_counts.__getitem__)
        raise DataError(
            f"`language` is {language}, but {foreign_counts[locale]} of {counts.total()} rows "
            f"have the locale {locale}. Set `language: {locale}`."
        )

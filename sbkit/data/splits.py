"""The splits of a run: their preparation, their columns and their transcripts.

manifest -> transcripts, normalized each time -> audio, decoded once -> Dataset
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import InMemoryTable, Table

from sbkit.audio.containers import AudioError
from sbkit.audio.io import BEYOND_END
from sbkit.audio.lengths import Subsampling
from sbkit.base.arrays import Bools, Counts
from sbkit.base.content_cache import keep
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.units import at_speed, frames_needed, samples_to_seconds, seconds_to_samples
from sbkit.data.cache import FILES, StoredAudio, cache_audio, plan_audio
from sbkit.data.columns import CUT_SHORT
from sbkit.data.manifest import RESERVED_COLUMNS, STORED, Excluded, Manifest, to_texts
from sbkit.data.shard import AUDIO, LAZY
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.vocabulary import Vocabulary

MAX_UNUSABLE_SHARE = 0.05  # of a split's rows; with more, the run is refused
TOKEN_COUNTS_FOLDER = "token_counts"  # of the cache
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"  # reasons
TEXT_ROWS = 100_000  # in a batch


@dataclass(frozen=True)
class Splits:
    """The data of a run: one training set, and validation and test sets by their names."""

    train: datasets.Dataset
    valid: Mapping[str, datasets.Dataset]
    test: Mapping[str, datasets.Dataset]
    excluded: list[Excluded] = field(default_factory=list)  # unusable rows of all splits
    out_of_range: list[Excluded] = field(default_factory=list)  # by min_seconds and max_seconds
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # hashes of the contents
    # Counts of the rows that the run's filters leave out, by split and reason.
    filtered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # The share of each training source in an epoch (`sbkit.data.mix`); empty without a mix. The
    # training set then has the column `mix_source`.
    mix: Mapping[str, float | None] = field(default_factory=dict)

    def named(self) -> dict[str, datasets.Dataset]:
        return {"train": self.train, **self.valid, **self.test}

    def with_named(self, named: Mapping[str, datasets.Dataset]) -> Self:
        """Return splits with the same names and roles but other data."""
        return replace(
            self,
            train=named["train"],
            valid={name: named[name] for name in self.valid},
            test={name: named[name] for name in self.test},
        )

    def evaluated(self) -> dict[str, datasets.Dataset]:
        return {**self.valid, **self.test}


# Preparation


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched."""

    # The columns id, text (normalized), sentence, samples, the manifest's others, and audio, which
    # `read_rows` reads.
    dataset: datasets.Dataset
    excluded: list[Excluded]
    fingerprint: str  # changes if the ids, texts or audio files of the dataset do
    filtered: Mapping[str, int] = field(default_factory=dict)  # counts, by reason
    # The audio files as they were; see `StoredAudio`
    files: pa.Table = field(default_factory=FILES.empty_table)


# Keeps the rows of a split, which has this name; None if another process does so.
Keep = Callable[[str, Iterator[pa.Table]], Table | None]


def keep_in_memory(split: str, blocks: Iterator[pa.Table]) -> Table:
    """Return the rows of all blocks."""
    return InMemoryTable(pa.concat_tables(blocks))


def prepare_split(
    source: Manifest | Iterable[Manifest],
    *,
    split: str,
    normalize: Callable[[str], str],
    sample_rate: int,
    keep_empty: bool,
    store: str = "pcm",
    keep: Keep = keep_in_memory,
    roots: Sequence[Path] = (),
) -> PreparedSplit:
    """Normalize the texts of a split, and decode the clips that are not in the cache yet.

    Rows are prepared block by block, unless clips are decoded.

    source: the manifest, or its blocks.
    keep_empty: keep clips with an empty transcript. Only training can do without them: elsewhere,
        words recognized in silence are errors to be counted.
    store: the form of the decoded audio.
    keep: keeps the rows.
    roots: the folders that contain the audio files, as far as they are known.
    """
    preparation = _Preparation(split, normalize, sample_rate, keep_empty, roots)
    blocks = source.blocks() if isinstance(source, Manifest) else iter(source)
    blocks = map(preparation.add_texts, blocks)
    if store != LAZY:
        blocks = preparation.decode(blocks, store)
    rows = keep(split, map(preparation.finish, blocks))
    return preparation.result(rows)


class _Preparation:
    """What the blocks of a split have in common."""

    def __init__(
        self,
        split: str,
        normalize: Callable[[str], str],
        sample_rate: int,
        keep_empty: bool,
        roots: Sequence[Path],
    ) -> None:
        self._split = split
        self._normalize = normalize
        self._sample_rate = sample_rate
        self._keep_empty = keep_empty
        self._num_rows = 0
        self._unusable: list[Excluded] = []
        self._empty: list[Excluded] = []
        self._roots = roots
        self._files = [FILES.empty_table()]
        self._filtered = Counter[str]()
        self._hash = hashlib.sha256(f"{sample_rate}\n".encode())  # of ids, texts and audio
        self._hash_of_all = hashlib.sha256()  # of all columns

    def add_texts(self, block: Manifest) -> Manifest:
        self._num_rows += len(block) + len(block.excluded)
        self._unusable += [replace(row, split=self._split) for row in block.excluded]
        self._filtered.update(block.filtered)
        texts = pa.array(map(self._normalize, block.sentences), pa.string())
        block = Manifest(block.rows.append_column("text", texts))
        if self._keep_empty:
            return block
        is_empty = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
        for clip in block.filter(is_empty) if is_empty.any() else ():
            self._empty.append(Excluded(clip.id, EMPTY, clip.sentence, self._split))
        return block.filter(~is_empty)

    def decode(self, blocks: Iterator[Manifest], store: str) -> Iterator[Manifest]:
        """Add the location of the audio, once all clips that are not in shards are in the cache."""
        first = next(blocks)
        if STORED in first.rows.column_names:
            yield first
            yield from blocks
        else:
            find = partial(
                cache_audio,
                sample_rate=self._sample_rate,
                store=store,
                roots=self._roots,
                title=f"Decoding {self._split}",
            )
            yield from self.locate(Manifest.join(chain([first], blocks)), find).blocks()

    def locate(self, manifest: Manifest, find: Callable[[Manifest], StoredAudio]) -> Manifest:
        stored, errors, files = find(manifest)
        self._files.append(files)
        for row, error in errors.items():
            clip = manifest[row]
            self._unusable.append(Excluded(clip.id, reason_of(error), str(error), self._split))
        is_readable = np.ones(len(manifest), bool)
        is_readable[[*errors]] = False
        rows = manifest.filter(is_readable).rows
        return Manifest(rows.append_column(STORED, stored.to_struct_array()))

    def finish(self, block: Manifest) -> pa.Table:
        if STORED not in block.rows.column_names:
            find = partial(plan_audio, sample_rate=self._sample_rate, roots=self._roots)
            block = self.locate(block, find)
        rows = block.rows
        stored = pa.Table.from_struct_array(rows[STORED])
        corpus_columns = [name for name in rows.column_names if name not in RESERVED_COLUMNS]
        located = [name for name in stored.column_names if name not in ("digest", AUDIO)]
        table = pa.table(
            {name: rows[name] for name in ("id", "text", "sentence")}
            | {name: stored[name] for name in located}
            | {name: rows[name] for name in corpus_columns}
            | {AUDIO: stored[AUDIO]}
        )
        # The contents of a split, but not where or when they were stored
        columns = (table["id"], table["text"], table["samples"].cast("string"), stored["digest"])
        _update(self._hash, columns)
        names = [name for name in table.column_names if name != AUDIO]
        self._hash_of_all.update(to_json(names).encode())
        texts = (table[name].cast("string").fill_null("\1") for name in names)  # "" is a value
        file, start = (pc.struct_field(stored[AUDIO], name) for name in ("file", "start"))
        lazy_file = pc.if_else(start.is_null(), file, "")  # two may have one size
        _update(self._hash_of_all, [*texts, columns[-1], lazy_file])
        return table

    def result(self, rows: Table | None) -> PreparedSplit:
        if rows is None:
            rows = InMemoryTable(pa.table({}))
        else:
            check_loss(self._split, self._unusable, self._num_rows)
        excluded = [*self._unusable, *self._empty]
        datasets.disable_progress_bars()
        dataset = datasets.Dataset(rows, fingerprint=self._hash_of_all.hexdigest()[:16])
        files = pa.concat_tables(self._files)
        return PreparedSplit(dataset, excluded, self._hash.hexdigest(), self._filtered, files)


def _update(hash: "hashlib._Hash", columns: Sequence[pa.ChunkedArray]) -> None:
    lines = pc.binary_join_element_wise(*columns, "\0", null_handling="replace").to_pylist()
    hash.update("".join(f"{line}\n" for line in lines).encode())


def reason_of(error: AudioError) -> str:
    """Return the reason to exclude a clip whose audio cannot be read."""
    return BEYOND_END if error.reason == BEYOND_END else UNREADABLE


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise DataError if more than `MAX_UNUSABLE_SHARE` of ``total`` rows is unusable."""
    lost = [row for row in lost if row.reason != CUT_SHORT]  # of a clip that is used
    if len(lost) <= MAX_UNUSABLE_SHARE * total:
        return
    reasons = Counter(row.reason for row in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    examples = "; ".join(f"{row.id}: {row.detail}" for row in lost[:3])
    raise DataError(
        f"{len(lost)} of {total} rows of {split} are unusable ({counts}); at most "
        f"{MAX_UNUSABLE_SHARE:.0%} may be. The first of them: {examples}"
    )


def within_limits(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> tuple[datasets.Dataset, list[Excluded]]:
    """Return the rows from ``min_seconds`` to ``max_seconds``, and the list of the others."""
    samples = sample_counts(train)
    is_short = samples < seconds_to_samples(min_seconds, sample_rate)
    is_long = samples > seconds_to_samples(max_seconds, sample_rate)
    out_of_range = []
    for mask, reason in (
        (is_short, f"shorter than {min_seconds:g} s"),
        (is_long, f"longer than {max_seconds:g} s"),
    ):
        ids = read_column(select_rows(train, mask), "id")
        for id, count in zip(ids, samples[mask].tolist(), strict=True):
            seconds = samples_to_seconds(count, sample_rate)
            out_of_range.append(Excluded(id, reason, f"{seconds:.2f} s", "train"))
    is_outside = is_short | is_long
    if len(train) and is_outside.all():
        raise ConfigError(
            f"None of the {len(train)} training utterances is between `min_seconds` "
            f"({min_seconds:g} s) and `max_seconds` ({max_seconds:g} s) long."
        )
    return select_rows(train, ~is_outside), out_of_range


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV with a line for each utterance."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [("split", "id", "reason", "detail")]
    rows += [(row.split, row.id, row.reason, row.detail) for row in excluded]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")


# Columns of a prepared split


def select_rows(split: datasets.Dataset, mask: Bools) -> datasets.Dataset:
    """Return the rows that a mask chooses; the split itself if it chooses all."""
    return split if mask.all() else split.select(np.flatnonzero(mask))


def take_columns(split: datasets.Dataset, *names: str) -> pa.Table:
    """Return some columns of the selected rows; a missing text is empty.

    `datasets` reads a selection row by row: 7.5 s for a million instead of 0.1.
    """
    columns = split.data.table.select(names)
    if split._indices is not None:
        columns = _take_rows(columns, split._indices.column(0).to_numpy())
    for index, name in enumerate(names):
        if columns[name].null_count:  # in rows joined from a split without this column
            columns = columns.set_column(index, name, columns[name].fill_null(""))
    return columns


def _take_rows(table: pa.Table, rows: npt.NDArray[np.uint64]) -> pa.Table:
    """Return rows of a table, block by block: Arrow's `take` refuses columns of over 2 GB."""
    order = np.argsort(rows, kind="stable")
    in_order = rows[order].astype(np.int64)
    starts = np.arange(0, len(table), TEXT_ROWS)
    bounds = [*np.searchsorted(in_order, starts), len(in_order)]
    blocks = [table.slice(0, 0)]
    for start, (first, end) in zip(starts, pairwise(bounds), strict=True):
        if first < end:
            inside = pa.array(in_order[first:end] - start)
            blocks.append(table.slice(start, TEXT_ROWS).take(inside))
    selection = pa.concat_tables(blocks)
    is_in_order = bool((np.diff(order) > 0).all())
    return selection if is_in_order else selection.take(pa.array(np.argsort(order)))


def read_column(split: datasets.Dataset, name: str) -> list[str]:
    """Return the texts of a column as strings."""
    return to_texts(take_columns(split, name)[name])


def sample_counts(split: datasets.Dataset) -> Counts:
    """Return the number of samples of every row."""
    counts: Counts = take_columns(split, "samples")["samples"].to_numpy()
    return counts


def shard_numbers(split: datasets.Dataset) -> Counts:
    """Return for every row the number of the shard with its audio; 0 for the cache."""
    audio = split.data.table[AUDIO]
    numbers: Counts = pc.struct_field(audio, "shard").to_numpy()
    return numbers if split._indices is None else numbers[split._indices.column(0).to_numpy()]


def read_texts(split: datasets.Dataset, name: str = "text") -> Iterator[list[str]]:
    """Yield the texts of a column in batches."""
    for columns in batch_columns(split, name):
        yield to_texts(columns[name])


def batch_columns(split: datasets.Dataset, *names: str) -> Iterator[pa.Table]:
    """Yield some columns of batches of rows, as `take_columns`, which copies a whole selection."""
    for start in range(0, len(split), TEXT_ROWS):
        rows = range(start, min(start + TEXT_ROWS, len(split)))
        yield take_columns(split.select(rows), *names)


def count_characters(batches: Iterable[Sequence[str]]) -> Counter[str]:
    """Count the characters of batches of texts, ten times as fast as `Counter` does."""
    total = np.zeros(0x110000, dtype=np.int64)  # code points
    for texts in batches:
        codes = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
        total += np.bincount(codes, minlength=len(total))
    return Counter({chr(code): int(total[code]) for code in np.flatnonzero(total)})


def spread_rows(count: int, max_rows: int) -> list[int]:
    """Return the indices of at most ``max_rows`` of ``count`` rows, evenly spread."""
    num_rows = min(count, max_rows)
    return [index * count // num_rows for index in range(num_rows)]


# Transcripts


@runtime_checkable
class TextTokenizer(Hashable, Protocol):
    """An object that turns normalized text into ids of a vocabulary."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Transcripts:
    """What each row of a split contains, in columns of counts and flags."""

    samples: Counts  # of the audio
    characters: Counts  # in the text
    tokens: Counts  # in the text
    frames_needed: Counts  # one for each token, and a blank between two that are equal
    refused: Bools  # whether the text contains an id that no loss accepts
    unknown: Bools  # whether it contains the unknown token

    def too_short(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Return the rows with too few frames for CTC, when played at a speed in percent."""
        return np.flatnonzero(self.frames(subsampling, percent) < self.frames_needed)

    def frames(self, subsampling: Subsampling, percent: int = 100) -> Counts:
        """Count the frames after the front-end, at a speed in percent."""
        return subsampling.count(at_speed(self.samples, percent))


def read_transcripts(split: datasets.Dataset, tokenizer: TextTokenizer) -> Transcripts:
    """Tokenize all texts of a split, or map the counts that an earlier call has stored."""

    def count() -> Counts:
        blocks = [_count_tokens(texts, tokenizer) for texts in read_texts(split)]
        return np.concatenate([np.empty((5, 0), np.int32), *blocks], axis=1)

    def write(file: Path) -> None:
        with file.open("wb") as content:
            np.save(content, count())

    if type(tokenizer) is Tokenizer:
        digest = hashlib.sha256(tokenizer.content).hexdigest()
        made_from = {"split": split._fingerprint, "tokenizer": digest}
        read = partial(np.load, mmap_mode="r")
        file = keep(TOKEN_COUNTS_FOLDER, made_from, write, is_current=lambda file: read(file).size)
        counts = read(file)
    else:  # of another class, whose code may change
        counts = count()
    characters, tokens, needed, refused, unknown = counts
    is_refused, is_unknown = refused.astype(bool), unknown.astype(bool)
    return Transcripts(sample_counts(split), characters, tokens, needed, is_refused, is_unknown)


def _count_tokens(texts: Sequence[str], tokenizer: TextTokenizer) -> Counts:
    """Count, for each text, what `Transcripts` has; (5, N) int32."""
    encoded = [tokenizer.encode(text) for text in texts]
    counts = np.fromiter(map(len, encoded), np.int64, len(texts))
    tokens = np.fromiter(chain.from_iterable(encoded), np.int64, counts.sum())
    rows = np.repeat(np.arange(len(texts)), counts)
    vocabulary = tokenizer.vocabulary
    is_refused = (tokens < 0) | (tokens >= vocabulary.size) | (tokens == vocabulary.blank)

    def rows_with(mask: Bools) -> Bools:
        return np.bincount(rows[mask], minlength=len(texts)) > 0

    columns = [
        np.fromiter(map(len, texts), np.int64, len(texts)),
        counts,
        frames_needed(tokens, counts),
        rows_with(is_refused),
        rows_with(tokens == vocabulary.unk),
    ]
    return np.stack(columns).astype(np.int32)

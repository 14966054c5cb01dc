"""The splits of a run: add normalized texts, read columns, and count tokens."""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import ConcatenationTable, MemoryMappedTable

from sbkit.base.arrays import Bools, Counts
from sbkit.base.errors import ConfigError
from sbkit.base.units import at_speed, frames_needed, samples_to_seconds, seconds_to_samples
from sbkit.base.versions import data_versions
from sbkit.config.keys import with_defaults
from sbkit.data.corpus import SettingValues
from sbkit.data.facts import cached_fact, fingerprint_of, measure_once
from sbkit.data.manifest import Excluded, check_locale, take_rows, to_texts
from sbkit.data.prepared import PreparedData
from sbkit.data.rows import PreparedSplit
from sbkit.data.shard import AUDIO, Row
from sbkit.data.work_units import short_digest
from sbkit.text.languages import parse_language
from sbkit.text.normalization import TEXT_VERSION, TextTable, count_gaps, has_spaces, text_table
from sbkit.text.tokenizer import TOKENIZER_VERSION, Tokenizer
from sbkit.text.transcripts import parse_tag_names, select_tags, transcript_normalizer
from sbkit.text.vocabulary import Vocabulary

if TYPE_CHECKING:  # torch takes seconds and 0.5 GB
    from sbkit.audio.lengths import Subsampling

EMPTY_TRANSCRIPT = "empty transcript"  # a reason to leave out a row
TEXT_ROWS = 100_000  # rows in a batch of texts


@dataclass(frozen=True)
class Splits:
    """The data of a run: one training set, and validation and test sets by their names."""

    train: datasets.Dataset
    valid: Mapping[str, datasets.Dataset]
    test: Mapping[str, datasets.Dataset]
    excluded: list[Excluded] = field(default_factory=list)  # unusable rows of all splits
    # Training rows shorter than min_seconds or longer than max_seconds
    out_of_range: list[Excluded] = field(default_factory=list)
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # hashes of the contents
    # Counts of the rows that the run's filters leave out, by split and reason
    filtered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # The share of each training source in an epoch (`sbkit.data.mix`). With a mix, the training
    # set has the column `mix_source`.
    mix: Mapping[str, float | None] = field(default_factory=dict)
    # Changes the audio of rows for a test, for example by adding noise; None: no change
    as_tested: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    table: TextTable | None = None  # normalized the transcripts

    def text_table(self, settings: SettingValues) -> TextTable:
        """Return the text table of the transcripts; without transcripts, that of the language."""
        settings = with_defaults(settings)
        return self.table or text_table(settings["language"], settings["text"])

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


# ---- preparation


def cached_column(
    rows: datasets.Dataset,
    name: str,
    made_from: Mapping[str, object],
    compute: Callable[[], Iterable[str]],
) -> MemoryMappedTable:
    """Return a column of texts, one per row, which `cached_fact` caches in a file."""

    def write(file: Path) -> None:
        schema = pa.schema({name: pa.string()})
        texts = iter(compute())
        with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, schema) as writer:
            while batch := list(islice(texts, TEXT_ROWS)):
                writer.write_table(pa.table([batch], schema))

    def read(file: Path) -> MemoryMappedTable:
        column = MemoryMappedTable.from_file(str(file))
        if len(column) != len(rows):
            raise ValueError(f"{file} has another number of texts")
        return column

    return cached_fact(rows, name, made_from, write, read)


def add_texts(
    split: PreparedSplit,
    name: str,
    normalize: Callable[[str], str],
    made_from: Mapping[str, object],
    *,
    keep_empty: bool,
) -> PreparedSplit:
    """Add the column ``text``: the normalized sentences, cached for each ``made_from``.

    made_from: plain data that names all inputs of `normalize`.
    keep_empty: whether to keep clips with an empty text. Only training may leave them out: in a
        test, words recognized in silence count as errors.
    """

    def compute() -> Iterable[str]:
        return map(normalize, chain.from_iterable(read_texts(split.dataset, "sentence")))

    made_from = {**made_from, "version": TEXT_VERSION}
    texts = cached_column(split.dataset, "text", made_from, compute)
    rows = ConcatenationTable.from_tables([split.dataset.data, texts], axis=1)
    fingerprint = short_digest([fingerprint_of(split.dataset), made_from, data_versions()])
    dataset = datasets.Dataset(rows, fingerprint=fingerprint)
    if keep_empty:
        return replace(split, dataset=dataset)
    is_empty = pc.equal(pc.utf8_trim_whitespace(texts.table["text"]), "").to_numpy()
    empty_rows = take_columns(select_rows(dataset, is_empty), "id", "sentence").to_pylist()
    excluded = [Excluded(row["id"], EMPTY_TRANSCRIPT, row["sentence"], name) for row in empty_rows]
    used_rows = select_rows(dataset, ~is_empty)
    return replace(split, dataset=used_rows, excluded=[*split.excluded, *excluded])


def normalize_texts(settings: SettingValues, data: PreparedData) -> tuple[PreparedData, TextTable]:
    """Add normalized transcripts to all splits; leave out training clips with empty ones.

    Returns the splits and the text table, which has spaces if the transcripts of train have them.
    """
    language = parse_language(settings["language"])
    tags = parse_tag_names(settings["keep_tags"])
    train = [data.splits[name].dataset for name in data.roles["train"]]
    table = text_table(language, settings["text"])
    table = replace(table, spaces=_separate_words(train))
    normalize = transcript_normalizer(table, tags)
    made_from = {name: settings[name] for name in ("language", "text", "keep_tags")}
    made_from["spaces"] = table.spaces
    splits: dict[str, PreparedSplit] = {}
    for name, split in data.splits.items():
        check_locale(split.dataset.data.table, language)
        keep_empty = name not in data.roles["train"]
        splits[name] = add_texts(split, name, normalize, made_from, keep_empty=keep_empty)
    return data._replace(splits=splits), table


def _separate_words(train: Iterable[datasets.Dataset]) -> bool:
    """Return whether the transcripts of train have spaces between words."""
    counts = [
        measure_once(split, "spaces", {"version": TEXT_VERSION}, partial(_count_spaces, split))
        for split in train
    ]
    characters = sum((Counter(split["characters"]) for split in counts), Counter[str]())
    return has_spaces(characters, sum(split["gaps"] for split in counts))


def _count_spaces(split: datasets.Dataset) -> dict[str, object]:
    """Count the characters of transcripts, and their spaces within unspaced scripts."""
    characters, gaps = Counter[str](), 0
    for sentences in read_texts(split, "sentence"):
        texts = [*map(select_tags, sentences)]
        characters.update(count_characters(texts))
        gaps += sum(map(count_gaps, texts))
    return {"characters": characters, "gaps": gaps}


def select_by_length(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> tuple[datasets.Dataset, list[Excluded]]:
    """Return the rows from ``min_seconds`` to ``max_seconds``, and a list of the other rows."""
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
            f"({min_seconds:g} s) and `max_seconds` ({max_seconds:g} s) long.",
            keys=("min_seconds",),
        )
    return select_rows(train, ~is_outside), out_of_range


# ---- columns of a prepared split


def select_rows(split: datasets.Dataset, mask: Bools) -> datasets.Dataset:
    """Return the rows that a mask chooses; the split itself if it chooses all."""
    return split if mask.all() else split.select(np.flatnonzero(mask))


def take_columns(split: datasets.Dataset, *names: str) -> pa.Table:
    """Return some columns of the selected rows; a missing text is empty.

    `datasets` reads a selection row by row: 7.5 s for a million instead of 0.1.
    """
    columns = split.data.table.select(names)
    indices = selected_indices(split)
    if indices is not None:
        columns = take_rows(columns, indices)
    for index, name in enumerate(names):
        if columns[name].null_count:  # in rows joined from a split without this column
            columns = columns.set_column(index, name, columns[name].fill_null(""))
    return columns


def selected_indices(split: datasets.Dataset) -> Counts | None:
    """Return the indices of a selection, which `datasets` keeps private; None for all rows."""
    if split._indices is None:
        return None
    indices: Counts = split._indices.column(0).to_numpy()
    return indices


def read_column(split: datasets.Dataset, name: str) -> list[str]:
    """Return the texts of a column as strings."""
    return to_texts(take_columns(split, name)[name])


def sample_counts(split: datasets.Dataset) -> Counts:
    """Return the number of samples of every row."""
    counts: Counts = take_columns(split, "samples")["samples"].to_numpy()
    return counts


def shard_numbers(split: datasets.Dataset) -> Counts:
    """Return the number of the shard with the audio of every row; 0 for shards of the cache."""
    audio = split.data.table[AUDIO]
    numbers: Counts = pc.struct_field(audio, "shard").to_numpy()
    indices = selected_indices(split)
    return numbers if indices is None else numbers[indices]


def read_texts(split: datasets.Dataset, name: str = "text") -> Iterator[list[str]]:
    """Yield the texts of a column in batches."""
    for columns in batch_columns(split, name):
        yield to_texts(columns[name])


def batch_columns(split: datasets.Dataset, *names: str) -> Iterator[pa.Table]:
    """Yield some columns in batches of rows; `take_columns` would copy a whole selection."""
    for start in range(0, len(split), TEXT_ROWS):
        rows = range(start, min(start + TEXT_ROWS, len(split)))
        yield take_columns(split.select(rows), *names)


def count_characters(texts: Sequence[str]) -> Counter[str]:
    """Count the characters of texts, ten times as fast as `Counter` does."""
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
    return Counter({chr(code): int(counts[code]) for code in np.flatnonzero(counts)})


def spread_rows(count: int, max_rows: int) -> list[int]:
    """Return the indices of at most ``max_rows`` of ``count`` rows, evenly spread."""
    num_rows = min(count, max_rows)
    return [index * count // num_rows for index in range(num_rows)]


# ---- transcripts


@runtime_checkable
class TextTokenizer(Hashable, Protocol):
    """An object that turns normalized text into ids of a vocabulary."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class TextCounts:
    """Counts and flags of each row of a split, in columns."""

    samples: Counts  # of the audio
    characters: Counts  # in the text
    tokens: Counts  # in the text
    frames_needed: Counts  # one per token, and one per blank between two equal tokens
    has_refused_id: Bools  # whether the text contains an id that no loss accepts
    has_unknown: Bools  # whether the text contains the unknown token

    def too_short(self, subsampling: "Subsampling", percent: int = 100) -> Counts:
        """Return the rows with too few frames for CTC if played at a speed in percent."""
        return np.flatnonzero(self.frames(subsampling, percent) < self.frames_needed)

    def frames(self, subsampling: "Subsampling", percent: int = 100) -> Counts:
        """Count the frames after the front-end, at a speed in percent."""
        return subsampling.count(at_speed(self.samples, percent))


def count_tokens(split: datasets.Dataset, tokenizer: TextTokenizer) -> TextCounts:
    """Tokenize and count all texts of a split; counts by sbkit's `Tokenizer` are cached."""

    def count() -> Counts:
        blocks = [_count_tokens(texts, tokenizer) for texts in read_texts(split)]
        return np.concatenate([np.empty((5, 0), np.int32), *blocks], axis=1)

    def write(file: Path) -> None:
        with file.open("wb") as content:
            np.save(content, count())

    if type(tokenizer) is Tokenizer:
        digest = hashlib.sha256(tokenizer.content).hexdigest()
        made_from = {"tokenizer": digest, "version": TOKENIZER_VERSION}
        read = partial(np.load, mmap_mode="r")
        counts = cached_fact(split, "token_counts", made_from, write, read)
    else:  # a tokenizer of another class, whose code may change
        counts = count()
    characters, tokens, frames, num_refused, num_unknown = counts
    return TextCounts(
        samples=sample_counts(split),
        characters=characters,
        tokens=tokens,
        frames_needed=frames,
        has_refused_id=num_refused.astype(bool),
        has_unknown=num_unknown.astype(bool),
    )


def _count_tokens(texts: Sequence[str], tokenizer: TextTokenizer) -> Counts:
    """Return the fields of `TextCounts`, except the samples, for texts; (5, N) int32."""
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

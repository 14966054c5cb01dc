"""The splits of a run: prepared from manifests, with roles and names, and read by whole columns.

manifest -> transcripts, normalized each time -> audio, decoded once -> Dataset
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import InMemoryTable

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.files import write_text_atomically
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.cache import StoredAudio, prepare_audio
from sbkit.data.manifest import Excluded, Manifest, unreserved_name
from sbkit.data.shard import AUDIO

MAX_UNUSABLE_SHARE = 0.05  # of a split's rows; with more, the run is refused
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"  # reasons
BATCH_ROWS = 100_000  # of texts


@dataclass(frozen=True)
class Splits:
    """The data of a run: one training set, and validation and test sets by their names.

    Attributes:
        train, valid, test: prepared splits.
        excluded: unusable rows and utterances of all splits.
        out_of_range: utterances of train that `min_seconds` and `max_seconds` exclude.
        fingerprints: a hash of the content of each split.
        unused: the rows of ``out_of_range``.
    """

    train: datasets.Dataset
    valid: Mapping[str, datasets.Dataset]
    test: Mapping[str, datasets.Dataset]
    excluded: list[Excluded] = field(default_factory=list)
    out_of_range: list[Excluded] = field(default_factory=list)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    unused: datasets.Dataset | None = None

    def named(self) -> dict[str, datasets.Dataset]:
        """Return every split by its name; the training set is `train`."""
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
        """Return the validation and test sets by their names."""
        return {**self.valid, **self.test}


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched.

    Attributes:
        dataset: columns id, text (normalized), sentence, samples, those of the manifest as
            strings, and audio, from which `read_rows` reads.
        excluded: rows and utterances that are not in it.
        fingerprint: changes if the ids, texts or audio files of the dataset do.
    """

    dataset: datasets.Dataset
    excluded: list[Excluded]
    fingerprint: str


def prepare_split(
    manifest: Manifest,
    *,
    split: str,
    normalize: Callable[[str], str],
    sample_rate: int,
    cache_folder: Path,
    keep_empty: bool,
    store: str = "pcm",
) -> PreparedSplit:
    """Normalize the texts of a split, and decode the clips that are not in the cache yet.

    Args:
        manifest: clips and excluded rows.
        split: its name.
        normalize: returns the text to learn for a sentence.
        sample_rate: Hz, of the decoded audio.
        cache_folder: where decoded audio is kept.
        keep_empty: keep empty transcripts. Only training can do without them: elsewhere, words
            recognized in silence are errors to be counted.
        store: the form of decoded audio.

    Raises:
        DataError: more than `MAX_UNUSABLE_SHARE` of the rows is unusable, or the cache cannot be
            written.
    """
    texts = [normalize(sentence) for sentence in manifest.sentences]
    with_text = np.array([row for row, text in enumerate(texts) if keep_empty or text.strip()], int)
    usable = manifest.take(with_text)
    if usable.stored is not None:
        stored, errors = StoredAudio(usable.stored, {})
    else:
        stored, errors = prepare_audio(
            usable.rows["path"],
            sample_rate=sample_rate,
            cache_folder=cache_folder,
            store=store,
            title=f"Decoding {split}",
        )
    lost = [replace(row, split=split) for row in manifest.excluded]
    for row, error in errors.items():
        lost.append(Excluded(usable[row].id, UNREADABLE, str(error), split))
    check_loss(split, lost, len(manifest) + len(manifest.excluded))
    empty = [
        Excluded(clip.id, EMPTY, clip.sentence, split)
        for clip in manifest.take(np.setdiff1d(np.arange(len(manifest)), with_text))
    ]
    rows = np.delete(with_text, list(errors))
    table = _join_columns(manifest.take(rows), [texts[row] for row in rows.tolist()], stored)
    fingerprint = _fingerprint(table, stored, sample_rate)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint[:16])
    return PreparedSplit(dataset, lost + empty, fingerprint)


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise DataError if more than `MAX_UNUSABLE_SHARE` of ``total`` rows is unusable."""
    if len(lost) <= MAX_UNUSABLE_SHARE * total:
        return
    reasons = Counter(row.reason for row in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    examples = "; ".join(f"{row.id}: {row.detail}" for row in lost[:3])
    raise DataError(
        f"{len(lost)} of {total} rows of {split} are unusable ({counts}); at most "
        f"{MAX_UNUSABLE_SHARE:.0%} may be. Repair the corpus; the first of them: {examples}"
    )


def _join_columns(manifest: Manifest, texts: Sequence[str], stored: pa.Table) -> pa.Table:
    columns = {
        "id": manifest.rows["id"],
        "text": pa.array(texts, pa.string()),
        "sentence": manifest.rows["sentence"],
        "samples": stored["samples"],
    }
    for name in manifest.columns.column_names:
        columns[unreserved_name(name)] = manifest.columns[name].fill_null("")
    return pa.table({**columns, AUDIO: stored[AUDIO]})


def _fingerprint(table: pa.Table, stored: pa.Table, sample_rate: int) -> str:
    """Hash the training data, but not where or when it was stored."""
    hash = hashlib.sha256(f"{sample_rate}\n".encode())
    columns = [table["id"], table["text"], stored["samples"], stored["digest"]]
    for id, text, samples, digest in zip(*(col.to_pylist() for col in columns), strict=True):
        hash.update(f"{id}\0{text}\0{samples}\0{digest}\n".encode())
    return hash.hexdigest()


def within_limits(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> tuple[datasets.Dataset, datasets.Dataset, list[Excluded]]:
    """Return the utterances from ``min_seconds`` to ``max_seconds``, the others, and their list.

    Raises:
        ConfigError: no utterance is within the limits.
    """
    samples = sample_counts(train)
    is_short = samples < seconds_to_samples(min_seconds, sample_rate)
    is_long = samples > seconds_to_samples(max_seconds, sample_rate)
    ids = take_columns(train, "id")["id"]
    out_of_range = []
    for mask, reason in (
        (is_short, f"shorter than {min_seconds:g} s"),
        (is_long, f"longer than {max_seconds:g} s"),
    ):
        for row in np.flatnonzero(mask).tolist():
            seconds = samples_to_seconds(int(samples[row]), sample_rate)
            out_of_range.append(Excluded(ids[row].as_py(), reason, f"{seconds:.2f} s", "train"))
    inside = np.flatnonzero(~(is_short | is_long))
    if len(train) and not len(inside):
        raise ConfigError(
            f"None of the {len(train)} training utterances is between `min_seconds` "
            f"({min_seconds:g}) and `max_seconds` ({max_seconds:g}) long. Widen the limits."
        )
    outside = np.flatnonzero(is_short | is_long)
    return train.select(inside), train.select(outside), out_of_range


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV with a line for each utterance."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [("split", "id", "reason", "detail")]
    rows += [(row.split, row.id, row.reason, row.detail) for row in excluded]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")


# Columns of a prepared split


def take_columns(split: datasets.Dataset, *names: str) -> pa.Table:
    """Return some columns of the selected rows; a missing text is empty.

    datasets reads the rows of a selection one by one: 7.5 s for a million, instead of 0.1.
    """
    columns = split.data.table.select(names)
    if split._indices is not None:
        columns = columns.take(split._indices.column(0))
    for index, name in enumerate(names):
        if columns[name].null_count:  # in rows joined from a split without this column
            columns = columns.set_column(index, name, columns[name].fill_null(""))
    return columns


def filled_rows(split: datasets.Dataset, column: str) -> npt.NDArray[np.int64]:
    """Return the indices of rows whose text in a column is more than white space."""
    texts = take_columns(split, column)[column].to_pylist()
    return np.flatnonzero(np.array([bool(text.strip()) for text in texts], dtype=np.bool_))


def sample_counts(split: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Return the length of the audio of every row."""
    counts: npt.NDArray[np.int64] = take_columns(split, "samples")["samples"].to_numpy()
    return counts


def shard_numbers(split: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Return the number of the shard with the audio of every row; 0 for the cache."""
    audio = take_columns(split, AUDIO)[AUDIO]
    numbers: npt.NDArray[np.int64] = pc.struct_field(audio, "shard").to_numpy()
    return numbers


def read_texts(split: datasets.Dataset, name: str = "text") -> Iterator[list[str]]:
    """Yield the texts of a column in batches."""
    column = take_columns(split, name)[name]
    for start in range(0, len(column), BATCH_ROWS):
        yield column.slice(start, BATCH_ROWS).to_pylist()


def count_characters(batches: Iterable[Sequence[str]]) -> Counter[str]:
    """Count the characters of batches of texts, ten times as fast as `Counter` does."""
    total = np.zeros(0x110000, dtype=np.int64)  # code points
    for texts in batches:
        codes = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
        total += np.bincount(codes, minlength=len(total))
    return Counter({chr(code): int(total[code]) for code in np.flatnonzero(total)})


def spread_rows(count: int, max_rows: int) -> list[int]:
    """Return the indices of at most ``max_rows`` of ``count`` rows, evenly spread."""
    if count <= max_rows:
        return [*range(count)]
    return [index * count // max_rows for index in range(max_rows)]

"""The splits of a run: by role and by name, and the utterances that it does without.

From the clips of a manifest to a dataset: normalized text beside audio that is decoded once.

manifest -> texts, normalized each time -> audio, from the cache or decoded into it -> Dataset

Whole columns of a prepared split.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets.table import InMemoryTable

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.cache import StoredAudio, prepare_audio
from sbkit.data.manifest import Clips, Excluded, Manifest, free_name
from sbkit.data.shard import AUDIO


@dataclass(frozen=True)
class Splits:
    """The data of a run: one training set, and validation and test sets by their names.

    excluded: what could not be used; out_of_range: what `min_seconds` and `max_seconds` keep out of
    train, and unused: their rows; fingerprints: a hash of what each split holds.
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

    def with_named(self, named: Mapping[str, datasets.Dataset]) -> "Splits":
        """Return splits of the same names and roles that hold other data."""
        return replace(
            self,
            train=named["train"],
            valid={name: named[name] for name in self.valid},
            test={name: named[name] for name in self.test},
        )

    def evaluated(self) -> dict[str, datasets.Dataset]:
        """Return the validation and test sets by their names."""
        return {**self.valid, **self.test}


def within_limits(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> tuple[datasets.Dataset, datasets.Dataset, list[Excluded]]:
    """Return the utterances from ``min_seconds`` to ``max_seconds``, the others, and their list.

    Raises:
        SbkitError: none is left.
    """
    samples = sample_counts(train)
    too_short = samples < seconds_to_samples(min_seconds, sample_rate)
    too_long = samples > seconds_to_samples(max_seconds, sample_rate)
    ids = take_columns(train, "id")["id"]
    out_of_range = [
        Excluded("train", ids[int(row)].as_py(), reason, f"{seconds:.2f} s")
        for rows, reason in (
            (too_short, f"shorter than {min_seconds:g} s"),
            (too_long, f"longer than {max_seconds:g} s"),
        )
        for row in np.flatnonzero(rows)
        for seconds in [samples_to_seconds(int(samples[row]), sample_rate)]
    ]
    kept = np.flatnonzero(~(too_short | too_long))
    if len(train) and not len(kept):
        raise SbkitError(
            f"`min_seconds` and `max_seconds` must leave something to train on, but none of the "
            f"{len(train)} utterances is between {min_seconds:g} and {max_seconds:g} s long. "
            "Widen them."
        )
    outside = np.flatnonzero(too_short | too_long)
    return train.select(kept), train.select(outside), out_of_range


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV, one utterance a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [tuple(field.name for field in fields(Excluded)), *map(astuple, excluded)]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")


MAX_LOST = 0.05  # share of a split's rows that may be unusable before the run is refused
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched.

    Attributes:
        dataset: columns id, text (normalized), sentence, samples, those of the manifest, as
            strings, and audio, the place from which `read_rows` reads it.
        excluded: what is not in it, and why.
        fingerprint: changes when the ids, texts or audio files of the dataset do.
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

    Only training can do without an empty transcript (``keep_empty=False``): elsewhere, words heard
    where there are none are errors to be counted.

    Raises:
        SbkitError: more than ``MAX_LOST`` of the rows is unusable, or the cache cannot be written.
    """
    clips = Clips.of(manifest.clips)
    texts = [normalize(sentence) for sentence in clips.sentences]
    spoken = np.array([row for row, text in enumerate(texts) if keep_empty or text.strip()], int)
    with_text = clips.take(spoken)
    if manifest.stored is not None:
        stored, errors = StoredAudio(manifest.stored.take(pa.array(spoken)), {})
    else:
        stored, errors = prepare_audio(
            with_text.own["path"],
            sample_rate=sample_rate,
            cache_folder=cache_folder,
            store=store,
            title=f"Decoding {split}",
        )
    lost = [Excluded(split, row.id, row.reason, row.detail) for row in manifest.bad_rows]
    lost += [
        Excluded(split, with_text[row].id, UNREADABLE, str(error)) for row, error in errors.items()
    ]
    check_loss(split, lost, len(clips) + len(manifest.bad_rows))
    empty = [
        Excluded(split, clips[row].id, EMPTY, clips[row].sentence)
        for row in np.setdiff1d(np.arange(len(clips)), spoken).tolist()
    ]
    rows = np.delete(spoken, list(errors))
    table = _join(clips.take(rows), [texts[row] for row in rows.tolist()], stored)
    fingerprint = _fingerprint(table, stored, sample_rate)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint[:16])
    return PreparedSplit(dataset, lost + empty, fingerprint)


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise SbkitError where more than ``MAX_LOST`` of a split's ``total`` rows is unusable."""
    if len(lost) <= MAX_LOST * total:
        return
    reasons = Counter(item.reason for item in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    first = "; ".join(f"{item.id}: {item.detail}" for item in lost[:3])
    raise SbkitError(
        f"At most {MAX_LOST:.0%} of the rows of {split} may be unusable, but {len(lost)} of "
        f"{total} are ({counts}). Repair the corpus; the first ones: {first}"
    )


def _fingerprint(table: pa.Table, stored: pa.Table, sample_rate: int) -> str:
    """Hash what trains, and not where or when it was stored."""
    digest = hashlib.sha256(f"{sample_rate}\n".encode())
    columns = [table["id"], table["text"], stored["samples"], stored["digest"]]
    for id, text, samples, of_file in zip(*(each.to_pylist() for each in columns), strict=True):
        digest.update(f"{id}\0{text}\0{samples}\0{of_file}\n".encode())
    return digest.hexdigest()


def _join(clips: Clips, texts: Sequence[str], stored: pa.Table) -> pa.Table:
    """Return all columns of a split: those of its clips beside their texts and their audio."""
    columns = {
        "id": clips.own["id"],
        "text": pa.array(texts, pa.string()),
        "sentence": clips.own["sentence"],
        "samples": stored["samples"],
    }
    for name in clips.columns.column_names:
        columns[free_name(name)] = clips.columns[name].fill_null("")
    return pa.table({**columns, AUDIO: stored[AUDIO]})


ROWS_AT_ONCE = 100_000


def take_columns(split: datasets.Dataset, *names: str) -> pa.Table:
    """Return some columns of a selection of rows, whole; a text that is not there is empty.

    datasets takes the rows of a selection one by one: 7.5 s for a million, instead of 0.1.
    """
    columns = split.data.table.select(names)
    if split._indices is not None:
        columns = columns.take(split._indices.column(0))
    for place, name in enumerate(names):
        if columns[name].null_count:  # of a split that was joined to one without this column
            columns = columns.set_column(place, name, columns[name].fill_null(""))
    return columns


def filled_rows(split: datasets.Dataset, column: str) -> npt.NDArray[np.int64]:
    """Return the rows in which a column of texts is more than white space."""
    texts = take_columns(split, column)[column].to_pylist()
    return np.flatnonzero(np.array([bool(text.strip()) for text in texts], dtype=np.bool_))


def sample_counts(split: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Return the length of the audio of every row."""
    counts: npt.NDArray[np.int64] = take_columns(split, "samples")["samples"].to_numpy()
    return counts


def shard_numbers(split: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Return the number of the shard that holds the audio of every row; 0 for the cache's."""
    places = take_columns(split, AUDIO)[AUDIO]
    numbers: npt.NDArray[np.int64] = pc.struct_field(places, "shard").to_numpy()
    return numbers


def read_texts(split: datasets.Dataset, name: str = "text") -> Iterator[list[str]]:
    """Yield the texts of a column of a split, some at a time."""
    column = take_columns(split, name)[name]
    for start in range(0, len(column), ROWS_AT_ONCE):
        yield column.slice(start, ROWS_AT_ONCE).to_pylist()


def count_characters(texts: Iterable[Sequence[str]]) -> Counter[str]:
    """Count the characters of texts, which come in parts, ten times as fast as `Counter` does."""
    total = np.zeros(0x110000, dtype=np.int64)  # code points
    for part in texts:
        codes = np.frombuffer("".join(part).encode("utf-32-le"), "<u4")
        total += np.bincount(codes, minlength=len(total))
    return Counter({chr(code): int(total[code]) for code in np.flatnonzero(total)})


def spread_rows(count: int, most: int) -> list[int]:
    """Return at most so many rows of a split, evenly spread over it."""
    return [row * count // most for row in range(most)] if count > most else [*range(count)]

"""From the clips of a manifest to a dataset: normalized text beside audio that is decoded once.

manifest -> texts, normalized each time -> audio, from the cache or decoded into it -> Dataset
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.data.corpora.clips import Clips, Paths
from sbkit.data.corpora.manifest import Manifest, free_name
from sbkit.data.corpora.splits import Excluded
from sbkit.data.storage.audio_cache import AudioCache
from sbkit.data.storage.audio_store import COLUMNS, SHARDED
from sbkit.data.storage.fill import CachedAudio

MAX_LOST = 0.05  # share of a split's rows that may be unusable before the run is refused
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched.

    Attributes:
        dataset: columns id, text (normalized), sentence, samples, those of the manifest, as
            strings, and one of `audio_store`; it is read from disk when it is asked for.
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
    spoken = [row for row, text in enumerate(texts) if keep_empty or text.strip()]
    if manifest.stored is None:
        audio = _prepare_audio(clips, spoken, sample_rate, cache_folder, store, split)
    else:
        audio = _stored_audio(manifest.stored, spoken)
    lost = [Excluded(split, row.id, row.reason, row.detail) for row in manifest.bad_rows]
    reasons: Counter[str] = Counter(row.reason for row in manifest.bad_rows)
    kept, found = list[int](), list[CachedAudio]()
    for row, each in zip(spoken, audio, strict=True):
        if isinstance(each, AudioError):
            lost.append(Excluded(split, clips[row].id, UNREADABLE, str(each)))
            reasons[f"{UNREADABLE}: {each.reason}"] += 1
        else:
            kept.append(row)
            found.append(each)
    refuse_heavy_loss(split, lost, reasons, len(clips) + len(manifest.bad_rows))
    empty = [
        Excluded(split, clips[row].id, EMPTY, clips[row].sentence)
        for row in sorted(set(range(len(clips))).difference(spoken))
    ]
    table = _texts(clips, texts, kept, found)
    fingerprint = _fingerprint(table, found, sample_rate)
    if manifest.stored is None:
        dataset = _join(table, found, COLUMNS[store], fingerprint)
    else:
        places = manifest.stored[SHARDED].take(pa.array(kept, pa.int64()))
        with_places = InMemoryTable(table.append_column(SHARDED, places))
        dataset = datasets.Dataset(with_places, fingerprint=fingerprint[:16])
    return PreparedSplit(dataset, lost + empty, fingerprint)


def _stored_audio(stored: pa.Table, rows: Sequence[int]) -> Sequence[CachedAudio]:
    """Return the length and digest of audio that lies in shards, and needs no preparation."""
    chosen = stored.take(pa.array(rows, pa.int64()))
    values = zip(rows, *(chosen[name].to_pylist() for name in ("samples", "digest")), strict=True)
    return [CachedAudio("", row, samples, digest) for row, samples, digest in values]


def _prepare_audio(
    clips: Clips,
    rows: Sequence[int],
    sample_rate: int,
    cache_folder: Path,
    store: str,
    split: str,
) -> Sequence[CachedAudio | AudioError]:
    if not rows:
        return []
    paths = Paths(_take(clips.own, np.array(rows))["path"])
    cache = AudioCache.of(paths, sample_rate, cache_folder, store)
    return cache.prepare(paths, title=f"Decoding {split}")


def refuse_heavy_loss(
    split: str, lost: Sequence[Excluded], reasons: Mapping[str, int], total: int
) -> None:
    """Raise SbkitError where more than ``MAX_LOST`` of a split's ``total`` rows is unusable."""
    if len(lost) <= MAX_LOST * total:
        return
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
    first = "; ".join(f"{item.id}: {item.detail}" for item in lost[:3])
    raise SbkitError(
        f"At most {MAX_LOST:.0%} of the rows of {split} may be unusable, but {len(lost)} of "
        f"{total} are ({counts}). Repair the corpus; the first ones: {first}"
    )


def _fingerprint(table: pa.Table, audio: Sequence[CachedAudio], sample_rate: int) -> str:
    """Hash what trains, and not where or when it was stored."""
    digest = hashlib.sha256(f"{sample_rate}\n".encode())
    texts = zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
    for (id, text), each in zip(texts, audio, strict=True):
        digest.update(f"{id}\0{text}\0{each.samples}\0{each.digest}\n".encode())
    return digest.hexdigest()


def _join(
    table: pa.Table, audio: Sequence[CachedAudio], column: str, fingerprint: str
) -> datasets.Dataset:
    """Join the texts with the audio, which stays where it is on the disk.

    A table takes whole shards, in which each row is used once. So a shard comes once more for
    every further time that one of its rows is used, and the rows in use are then selected.
    """
    places: dict[tuple[int, str], tuple[list[int], list[int]]] = {}  # rows of the shard, the split
    uses: Counter[tuple[str, int]] = Counter()
    for number, (file, row, _, _) in enumerate(audio):
        use = uses[file, row]
        uses[file, row] = use + 1
        shard_rows, numbers = places.setdefault((use, file), ([], []))
        shard_rows.append(row)
        numbers.append(number)
    blocks, chosen, start = [], np.empty(len(audio), np.int64), 0
    for (_, file), (shard_rows, numbers) in places.items():
        stored = MemoryMappedTable.from_file(file).rename_columns([column])
        source = np.full(len(stored), -1)
        source[shard_rows] = numbers
        beside = _take(table, source)
        blocks.append([InMemoryTable(beside), stored])
        chosen[numbers] = start + np.array(shard_rows)
        start += len(stored)
    datasets.disable_progress_bars()
    if not blocks:
        none = pa.array([], pa.binary())
        return datasets.Dataset(InMemoryTable(table.append_column(column, none)))
    joined = ConcatenationTable.from_blocks(blocks)
    dataset = datasets.Dataset(joined, fingerprint=fingerprint[:16])
    everything = start == len(audio) and np.array_equal(chosen, np.arange(start))
    return dataset if everything else dataset.select(chosen)


def _take(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return some rows, null where one is negative; a run of rows is not copied."""
    if len(rows) and rows[0] >= 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return table.slice(int(rows[0]), len(rows))
    return table.take(pa.array(rows, mask=rows < 0))


def _texts(
    clips: Clips, texts: Sequence[str], rows: Sequence[int], audio: Sequence[CachedAudio]
) -> pa.Table:
    """Return all columns of some rows but the audio, in the order of the split."""
    chosen = np.array(rows, dtype=np.int64)
    own, others = _take(clips.own, chosen), _take(clips.columns, chosen)
    columns = {
        "id": own["id"],
        "text": pa.array([texts[row] for row in rows], pa.string()),
        "sentence": own["sentence"],
        "samples": pa.array([each.samples for each in audio], pa.int64()),
    }
    for name in clips.columns.column_names:
        columns[free_name(name)] = others[name].fill_null("")
    return pa.table(columns)

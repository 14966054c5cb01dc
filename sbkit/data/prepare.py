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
import pyarrow as pa
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.data.audio_cache import AudioCache, CachedAudio
from sbkit.data.manifest import Clip, Manifest
from sbkit.data.splits import Excluded

MAX_LOST = 0.05  # share of a split's rows that may be unusable before the run is refused
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"
OWN_COLUMNS = ("id", "text", "sentence", "samples", "audio")


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched.

    Attributes:
        dataset: columns id, text (normalized), sentence, samples, audio (int16, little-endian) and
            those of the manifest, as strings; audio is read from disk when it is asked for.
        excluded: what is not in it, and why.
        fingerprint: changes when the ids, texts or audio files of the dataset do.
    """

    dataset: datasets.Dataset
    excluded: list[Excluded]
    fingerprint: str


@dataclass(frozen=True)
class _Row:
    clip: Clip
    text: str
    audio: CachedAudio


def prepare_split(
    manifest: Manifest,
    *,
    split: str,
    normalize: Callable[[str], str],
    sample_rate: int,
    cache_folder: Path,
    keep_empty: bool,
) -> PreparedSplit:
    """Normalize the texts of a split, and decode the clips that are not in the cache yet.

    Only training can do without an empty transcript (``keep_empty=False``): elsewhere, words heard
    where there are none are errors to be counted.

    Raises:
        SbkitError: more than ``MAX_LOST`` of the rows is unusable, or the cache cannot be written.
    """
    lost = [Excluded(split, row.id, row.reason, row.detail) for row in manifest.bad_rows]
    texts = [normalize(clip.sentence) for clip in manifest.clips]
    used = [
        (clip, text)
        for clip, text in zip(manifest.clips, texts, strict=True)
        if text.strip() or keep_empty
    ]
    empty = [
        Excluded(split, clip.id, EMPTY, clip.sentence)
        for clip, text in zip(manifest.clips, texts, strict=True)
        if not (text.strip() or keep_empty)
    ]
    rows: list[_Row] = []
    reasons: Counter[str] = Counter(row.reason for row in manifest.bad_rows)
    for (clip, text), audio in zip(
        used, _prepare_audio(used, sample_rate, cache_folder, split), strict=True
    ):
        if isinstance(audio, AudioError):
            lost.append(Excluded(split, clip.id, UNREADABLE, str(audio)))
            reasons[f"{UNREADABLE}: {audio.reason}"] += 1
        else:
            rows.append(_Row(clip, text, audio))
    _refuse_heavy_loss(split, lost, reasons, len(manifest.clips) + len(manifest.bad_rows))
    fingerprint = _fingerprint(rows, sample_rate)
    return PreparedSplit(_join(rows, fingerprint), lost + empty, fingerprint)


def _prepare_audio(
    used: Sequence[tuple[Clip, str]], sample_rate: int, cache_folder: Path, split: str
) -> Sequence[CachedAudio | AudioError]:
    paths = [clip.path for clip, _ in used]
    if not paths:
        return []
    cache = AudioCache.of(paths, sample_rate, cache_folder)
    return cache.prepare(paths, title=f"Decoding {split}")


def _refuse_heavy_loss(
    split: str, lost: Sequence[Excluded], reasons: Mapping[str, int], total: int
) -> None:
    if len(lost) <= MAX_LOST * total:
        return
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
    first = "; ".join(f"{item.id}: {item.detail}" for item in lost[:3])
    raise SbkitError(
        f"At most {MAX_LOST:.0%} of the rows of {split} may be unusable, but {len(lost)} of "
        f"{total} are ({counts}). Repair the corpus; the first ones: {first}"
    )


def _fingerprint(rows: Sequence[_Row], sample_rate: int) -> str:
    """Hash what trains, and not where or when it was stored."""
    digest = hashlib.sha256(f"{sample_rate}\n".encode())
    for row in rows:
        fields = (row.clip.id, row.text, str(row.audio.samples), row.audio.digest)
        digest.update("\0".join(fields).encode() + b"\n")
    return digest.hexdigest()


def _join(rows: Sequence[_Row], fingerprint: str) -> datasets.Dataset:
    """Join the texts with the audio, which stays where it is on the disk.

    A table takes whole shards, in which each row is used once. So a shard comes once more for
    every further time that one of its rows is used, and the rows in use are then selected.
    """
    texts = _texts(rows)
    places: dict[tuple[int, Path], list[tuple[int, int]]] = {}  # (row of the shard, of the split)
    uses: Counter[tuple[Path, int]] = Counter()
    for number, row in enumerate(rows):
        place = (row.audio.file, row.audio.row)
        places.setdefault((uses[place], row.audio.file), []).append((row.audio.row, number))
        uses[place] += 1
    blocks, chosen, start = [], np.empty(len(rows), np.int64), 0
    for (_, file), pairs in places.items():
        audio = MemoryMappedTable.from_file(str(file))
        shard_rows, numbers = np.array(pairs).T
        source = np.full(len(audio), -1)
        source[shard_rows] = numbers
        beside = texts.take(pa.array(source, mask=source < 0))
        blocks.append([InMemoryTable(beside), audio])
        chosen[numbers] = start + shard_rows
        start += len(audio)
    datasets.disable_progress_bars()
    if not blocks:
        none = pa.array([], pa.binary())
        return datasets.Dataset(InMemoryTable(texts.append_column("audio", none)))
    table = ConcatenationTable.from_blocks(blocks)
    dataset = datasets.Dataset(table, fingerprint=fingerprint[:16])
    everything = start == len(rows) and np.array_equal(chosen, np.arange(start))
    return dataset if everything else dataset.select(chosen)


def _texts(rows: Sequence[_Row]) -> pa.Table:
    """Write all columns but the audio, in the order of the split."""
    names = dict.fromkeys(name for row in rows for name in row.clip.columns)
    columns = {
        "id": pa.array([row.clip.id for row in rows], pa.string()),
        "text": pa.array([row.text for row in rows], pa.string()),
        "sentence": pa.array([row.clip.sentence for row in rows], pa.string()),
        "samples": pa.array([row.audio.samples for row in rows], pa.int64()),
    }
    for name in names:
        if name not in OWN_COLUMNS:
            values = [row.clip.columns.get(name, "") for row in rows]
            columns[name] = pa.array(values, pa.string())
    return pa.table(columns)
